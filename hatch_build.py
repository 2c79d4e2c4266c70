"""The text that PyPI shows: README.md with links into the repository, which PyPI does not have around it."""

from __future__ import annotations

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

REPOSITORY = "lightning-asyncpp/lightning-asyncpp"


class Readme(MetadataHookInterface):
    """Makes the relative links of README.md absolute: pictures to their bytes, all others to their pages."""

    def update(self, metadata: dict) -> None:
        """Set the readme of the package."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = re.sub(r"(!\[[^]]*\]\()(?!https:)", rf"\1https://raw.githubusercontent.com/{REPOSITORY}/main/", text)
        text = re.sub(r"(\]\()(?!https:)", rf"\1https://github.com/{REPOSITORY}/blob/main/", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
