"""Files of the Hugging Face Hub."""

from __future__ import annotations

import re
from pathlib import Path

from lightning_asyncpp.data.errors import DataError

_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")  # "gpt2", "HuggingFaceTB/SmolLM-360M"


def is_hub_name(name: str) -> bool:
    """Whether ``name`` reads like a repository of the hub, and like no file of this machine."""
    return _NAME.fullmatch(name) is not None and not name.endswith(".json") and not Path(name).exists()


def fetch(name: str, file: str) -> Path:
    """Return the path of a file of a repository of models, from the hub's cache where it is there already.

    Raises:
        DataError: the hub cannot be reached, or has no such file.
    """
    import huggingface_hub  # it takes as long as half of this package

    try:
        return Path(huggingface_hub.hf_hub_download(name, file))
    except Exception as error:  # the client's HTTP library, and with it its exceptions, changed twice already
        reason = next(iter(str(error).strip().splitlines()), "")
        raise DataError(
            f"{name!r} is no file or folder here, and the Hugging Face Hub gives no {file} of it"
            f" ({type(error).__name__}: {reason}). Correct the name, or without internet copy the repository here"
            f" (`hf download {name} --local-dir DIR`) and give its path"
        ) from error
