from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    """Return a folder with 40 documents of 620 to 935 bytes each, in which no two lines are equal."""
    folder = tmp_path / "text"
    folder.mkdir()
    for index in range(40):
        lines = [f"document {index} line {line} {index * line}\n" for line in range(30 + index % 10)]
        (folder / f"{index}.txt").write_text("".join(lines))
    return folder
