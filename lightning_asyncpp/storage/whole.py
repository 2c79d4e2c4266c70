"""A checkpoint in one file of ``torch.save``, with a checksum of all of it at its end.

It stands where whoever reads zip archives expects a comment. The archive has checksums of its own, but of what it holds
alone: not of its lists of what is where, nor of padding.
"""

from __future__ import annotations

import errno
import os
import pickle
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from safetensors.torch import load_file as load_safetensors

from lightning_asyncpp.storage.durable import make_folder, replace_durably, size_of
from lightning_asyncpp.storage.names import StorageError, aside_of, beside, check_replaceable, remove, remove_leftovers

_MARK = b"CRC-32 of the rest: %08x"
_MARKED = re.compile(rb"CRC-32 of the rest: ([0-9a-f]{8})")
_MARK_BYTES = len(_MARK % 0)
_END_BYTES, _END = 22, b"PK\5\6"  # of a zip archive without a comment; its last two bytes are the length of one
_LENGTH = struct.pack("<H", _MARK_BYTES)
_READ_BYTES = 2**20
_ARCHIVE, _PICKLE = b"PK\3\4", b"\x80"
_SAFETENSORS = ".safetensors"
_COLOURS = re.compile("\x1b\\[[0-9;]*m")
Done = Callable[[int], object]


def save_file(content: Any, path: Path, done: Done = lambda num_bytes: None) -> None:
    """Write a checkpoint; a file of that name stays as it is until the new one is complete and on the disk.

    Args:
        content: what ``torch.save`` takes.
        path: the file; its folder is made.
        done: called with numbers of bytes, as they are written.

    Raises:
        StorageError: it cannot be written.
    """
    with written_beside(path) as partial:
        write_sealed(content, partial, done)


def read_file(path: Path, weights_only: bool | None = None) -> Any:
    """Read a checkpoint in one file; its tensors are mapped into memory, and copied when they are used.

    Args:
        path: of ``torch.save``, or safetensors.
        weights_only: False runs code that the file may hold; anything else refuses it.

    Raises:
        StorageError: there is none, it is damaged, or it holds code.
    """
    try:
        if path.suffix == _SAFETENSORS:
            return load_safetensors(path)
        with path.open("rb") as file:
            # torch opens a file twice; by this name it is the same one, also where a run replaces it meanwhile.
            same = f"/dev/fd/{file.fileno()}"
            return torch.load(
                same if os.path.exists(same) else path, map_location="cpu", weights_only=weights_only is not False,
                mmap=zipfile.is_zipfile(file) or None,
            )  # fmt: skip
    except Exception as error:  # a damaged file may be taken for any sequence of the unpickler's instructions
        raise unreadable(path, error) from error


@contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """Write a file or a folder under another name, and give it its own at the end; nothing is left behind otherwise.

    Raises:
        StorageError: what runs inside fails to write, the renaming fails, or ``path`` is a folder of something else.
    """
    partial = beside(path)
    try:
        make_folder(path.parent)
        remove_leftovers(path)
        check_replaceable(path)
        yield partial
        replace_durably(partial, path)
    except (OSError, RuntimeError) as error:
        raise not_written(path, error) from error
    finally:
        remove(partial)


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


def damage_of(file: BinaryIO) -> str:
    """What is wrong with a file of ``torch.save``, as far as checksums say; nothing if none does.

    One that has no checksum of its own is compared with those of the archive.

    Raises:
        OSError: it cannot be read.
        zipfile.BadZipFile: it cannot be taken apart.
    """
    size = size_of(file)
    file.seek(max(size - _MARK_BYTES - len(_LENGTH), 0))
    end = file.read()
    if marked := _MARKED.fullmatch(end[len(_LENGTH) :]):
        found = b"%08x" % _sum_of(file, size - len(end))
        return "" if (found, end[: len(_LENGTH)]) == (marked[1], _LENGTH) else _differs(found, marked[1])
    if not zipfile.is_zipfile(file):
        return ""
    with zipfile.ZipFile(file) as archive:
        if archive.comment:
            return "its checksum cannot be read"
        entry = archive.testzip()
    return "" if entry is None else f"its entry {entry} differs from its CRC-32"


def not_written(path: Path, error: BaseException) -> StorageError:
    """The error to raise where a checkpoint could not be written."""
    reason = next(iter(str(error).strip().splitlines()), repr(error))
    kind = "" if isinstance(error, StorageError) else f"{type(error).__name__}: "
    before = "; what has that name is as complete as it was" if os.path.lexists(path) else ""
    return StorageError(f"the checkpoint {path} could not be written: {kind}{reason}{before}")


def missing(path: Path) -> StorageError:
    """The error to raise where there is no checkpoint; it names the one that lost its name to an interrupted save."""
    aside = "".join(
        f", but {other.name} was moved aside by a save that was interrupted and had this name: rename it"
        for other in aside_of(path)[-1:]
    )
    return StorageError(f"there is no checkpoint {path}{aside}")


def no_regular_file(path: Path) -> str:
    """What is wrong with a pipe, a device and the like."""
    return f"{path} is no regular file: name a checkpoint, or a copy of what comes from there"


def unreadable(path: Path, error: BaseException) -> StorageError:
    """The error to raise where a checkpoint could not be read."""
    if isinstance(error, FileNotFoundError):
        return missing(path)
    if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # such as of places that a file has not
        return StorageError(f"{path} cannot be read ({error.strerror})")
    # Of a text torch would advise to run its code, and of other things it says what its unpickler stumbled over.
    if path.is_file() and (found := _looks_wrong(path)):
        return StorageError(f"{path} is damaged or no checkpoint: {found}")
    reason = next(iter(_COLOURS.sub("", str(error)).strip().splitlines()), repr(error))
    if isinstance(error, pickle.UnpicklingError):
        return StorageError(
            f"{path} cannot be read without running code that it may hold: {reason}. If it is yours and you trust it,"
            " pass weights_only=False to what loads it in Python"
        )
    return StorageError(f"{path} is damaged or no checkpoint: {type(error).__name__}: {reason}")


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


def _looks_wrong(path: Path) -> str:
    """Why a file is neither a zip archive nor a pickle, which are what torch writes; nothing if it looks like one."""
    with path.open("rb") as file:
        start = file.read(len(_ARCHIVE))
    if not start:
        return "it is empty"
    if path.suffix == _SAFETENSORS or start[:1] == _PICKLE or zipfile.is_zipfile(path):
        return ""
    return "its end is missing" if start == _ARCHIVE else "it does not begin as a file of torch does"
