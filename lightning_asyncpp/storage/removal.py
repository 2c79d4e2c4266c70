"""What may be removed as a checkpoint: what is one. A name alone is data, and may come from anybody's file."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from lightning_asyncpp.storage.names import INDEX, foreign_files, is_folder
from lightning_asyncpp.storage.sharded import FORMAT

_START_BYTES = 2**10
_ARCHIVE, _FIRST_ENTRY = b"PK\3\4", b"/data.pkl"  # torch writes what is no tensor first
_NAME = slice(26, 28), 30  # in an archive's first bytes, the length of the first name, and where it stands
_LEGACY = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"  # the number that torch.save once began with
_LEGACY_WITHIN = 32


def is_checkpoint(path: Path) -> bool:
    """Whether a file begins as those of ``torch.save`` do, or a folder is one of a sharded checkpoint.

    What is damaged further on is one, too. Of a link that is asked of what it leads to.
    """
    try:
        if path.is_dir():
            return _is_of_parts(path)
        start = _start_of(path)
    except (OSError, ValueError):
        return False
    length = int.from_bytes(start[_NAME[0]], "little")
    first = start[_NAME[1] : _NAME[1] + length]
    is_archive = start.startswith(_ARCHIVE) and first.endswith(_FIRST_ENTRY)
    return is_archive or _LEGACY in start[:_LEGACY_WITHIN]


def _is_of_parts(folder: Path) -> bool:
    start = _start_of(folder / INDEX)
    return FORMAT.encode() in start or not (is_folder(folder) and foreign_files(folder))


def _start_of(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for somebody who writes
    with open(descriptor, "rb") as file:
        return file.read(_START_BYTES) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
