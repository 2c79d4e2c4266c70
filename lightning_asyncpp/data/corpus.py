"""Text files of a corpus, and their split into training and validation."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from lightning_asyncpp.errors import DataError

LIBRARIES = {"stdlib": "stdlib", "packages": "purelib"}
"""Special source (the standard library, or installed packages) -> `sysconfig`'s name of its folder."""
TEXT_PATTERNS = ("**/*.txt", "**/*.md", "**/*.rst", "**/*.py", "**/*.tex", "**/*.html", "**/*.json", "**/*.jsonl")
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Named:
    """Item with a name that is the same on every machine."""

    name: str

    def draw(self, purpose: str) -> float:
        """Return a number in [0, 1) that depends only on the name and the purpose."""
        return int.from_bytes(hashlib.sha256(os.fsencode(f"{purpose}:{self.name}")).digest()[:6], "big") / 2**48


Item = TypeVar("Item", bound=Named)


@dataclass(frozen=True)
class TextFile(Named):
    """Document of a corpus, named by its path in the corpus's folder, with forward slashes."""

    path: Path
    """Path of the file."""
    size: int
    """Length in bytes when the folder was listed."""

    def read(self) -> str:
        """Return the text.

        Raises:
            DataError: the text is not UTF-8.
        """
        try:
            return self.path.read_bytes().decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.path} is not UTF-8 text (byte {error.start}: {error.reason}). Convert it (iconv -t UTF-8), or"
                " give `patterns` that leave it out"
            ) from error


def find_text_files(
    source: str | Path, patterns: Sequence[str] = TEXT_PATTERNS, max_bytes: int | None = None
) -> list[TextFile]:
    """List the documents of a corpus in an order that depends only on their names.

    Args:
        source: a folder, ``"stdlib"`` for the running Python's standard library, or ``"packages"`` for the installed
            packages. Tests are left out of the latter two.
        patterns: globs of the files, relative to the folder; in the two libraries only globs that end in ``.py`` count.
            Hidden files and folders are left out.
        max_bytes: maximum number of bytes; documents that do not fit are skipped.

    Raises:
        DataError: ``source`` is not a folder, or no file matches.
    """
    library = LIBRARIES.get(str(source))
    folder = Path(source).expanduser() if library is None else Path(sysconfig.get_path(library))
    if not folder.is_dir():
        raise DataError(
            f"source={str(source)!r}: there is no such folder. Give a folder of text files (with `patterns`, to take"
            " some of them), a folder that `asyncpp prepare` wrote, 'stdlib', or 'packages'"
        )
    if library is not None:
        patterns = [pattern for pattern in patterns if pattern.endswith(".py")]
    files = _matching_files(folder, patterns, _NOT_LIBRARY if library else set())
    files.sort(key=lambda file: (file.draw("order"), file.name))
    taken = files if max_bytes is None else _within(files, max_bytes)
    if not taken:
        within = "" if max_bytes is None else f" within max_bytes={max_bytes}"
        raise DataError(
            f"{folder} holds no text file that matches {list(patterns)}{within}. Add files, or set `patterns`"
        )
    return taken


def check_arguments(val_fraction: float, batch_size: int = 1) -> None:
    """Check arguments that the data modules share.

    Raises:
        DataError: ``val_fraction`` is not in [0, 1), or ``batch_size`` is below 1.
    """
    if not 0 <= val_fraction < 1:
        raise DataError(f"val_fraction={val_fraction!r} (--val-fraction): not a share. Give a number from 0 to below 1")
    if batch_size < 1:
        raise DataError(f"batch_size={batch_size!r}: a batch has at least one sample. Give 1 or more")


def split(items: Sequence[Item], val_fraction: float) -> tuple[list[Item], list[Item]]:
    """Split documents into training and validation by a hash of their names.

    A document keeps its split when other documents are added or removed. The only exception: if a split would be empty
    although ``val_fraction`` is not 0, one document is moved to it.

    Raises:
        DataError: ``val_fraction`` is not a share, or not 0 although there is only one document.
    """
    check_arguments(val_fraction)
    if val_fraction > 0 and len(items) < 2:
        raise DataError(
            f"val_fraction={val_fraction} (--val-fraction): one file, or one .jsonl of up to 64 kB, is not divided. Set"
            " it to 0, or cut the text into several files"
        )
    draws = {item: item.draw("split") for item in items}
    validation = {item for item in items if draws[item] < val_fraction}
    if val_fraction > 0 and not validation:
        validation = {min(items, key=lambda item: draws[item])}
    elif len(validation) == len(items):
        validation.remove(max(items, key=lambda item: draws[item]))
    return [item for item in items if item not in validation], [item for item in items if item in validation]


def _matching_files(folder: Path, patterns: Sequence[str], left_out: set[str]) -> list[TextFile]:
    files = []
    for path in {path for pattern in patterns for path in folder.glob(pattern)}:
        parts = path.relative_to(folder).parts
        hidden = any(part.startswith(".") for part in parts)
        if not hidden and not left_out.intersection(parts) and path.is_file():
            files.append(TextFile("/".join(parts), path, path.stat().st_size))
    return files


def _within(files: Sequence[TextFile], max_bytes: int) -> list[TextFile]:
    taken, total = [], 0
    for file in files:
        if total + file.size <= max_bytes:
            taken.append(file)
            total += file.size
    return taken
