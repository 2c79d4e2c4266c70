"""A checksum of all of a file of ``torch.save``, at its end, where whoever reads zip archives expects a comment.

The archive has checksums of its own, but of what it holds alone: not of its lists of what is where, nor of padding.
"""

from __future__ import annotations

import re
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

_MARK = b"CRC-32 of the rest: %08x"
_MARKED = re.compile(rb"CRC-32 of the rest: ([0-9a-f]{8})")
_MARK_BYTES = len(_MARK % 0)
_END_BYTES, _END = 22, b"PK\5\6"  # of a zip archive without a comment; its last two bytes are the length of one
_LENGTH = struct.pack("<H", _MARK_BYTES)
_READ_BYTES = 2**20
Done = Callable[[int], object]


def write_sealed(content: Any, path: Path, done: Done = lambda num_bytes: None) -> None:
    """Write what ``torch.save`` takes, and its checksum.

    Args:
        content: it.
        path: the file.
        done: called with numbers of bytes, as they are written.

    Raises:
        OSError: it cannot be written.
    """
    with path.open("w+b") as file:
        summed = _Summed(file, done)
        try:
            torch.save(content, cast("IO[bytes]", summed))
        except RuntimeError:  # torch's, which does not know why
            if summed.error is not None:
                raise summed.error from None
            raise
        file.seek(-_END_BYTES, 2)
        if file.read(len(_END)) == _END:
            file.seek(-len(_LENGTH), 2)
            file.write(_LENGTH + _MARK % summed.crc32)


def damage_of(path: Path) -> str:
    """What is wrong with a file of ``torch.save``, as far as checksums say; nothing if none does.

    One that has no checksum of its own is compared with those of the archive.

    Raises:
        OSError: it cannot be read.
        zipfile.BadZipFile: it cannot be taken apart.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(size - _MARK_BYTES - len(_LENGTH), 0))
        end = file.read()
        if marked := _MARKED.fullmatch(end[len(_LENGTH) :]):
            found = b"%08x" % _sum_of(file, size - len(end))
            return "" if (found, end[: len(_LENGTH)]) == (marked[1], _LENGTH) else _differs(found, marked[1])
    if not zipfile.is_zipfile(path):
        return ""
    with zipfile.ZipFile(path) as archive:
        if archive.comment:
            return "its checksum cannot be read"
        entry = archive.testzip()
    return "" if entry is None else f"its entry {entry} differs from its CRC-32"


def _differs(found: bytes, written: bytes) -> str:
    return f"its CRC-32 is {found.decode()}, and was {written.decode()} when it was written"


def _sum_of(file: BinaryIO, size: int) -> int:
    """CRC-32 of a file's beginning, and the length of no comment."""
    file.seek(0)
    value = 0
    while size > 0 and (block := file.read(min(_READ_BYTES, size))):
        value = zlib.crc32(block, value)
        size -= len(block)
    return zlib.crc32(bytes(len(_LENGTH)), value)


class _Summed:
    """Keeps the CRC-32 of what is written, and the first error."""

    def __init__(self, file: BinaryIO, done: Done) -> None:
        self._file, self._done = file, done
        self.crc32 = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            written = self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        self.crc32 = zlib.crc32(data, self.crc32)
        self._done(written)
        return written

    def flush(self) -> None:
        self._file.flush()
