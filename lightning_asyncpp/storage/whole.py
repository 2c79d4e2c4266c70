"""A checkpoint in one file."""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lightning_asyncpp.durable import make_folder, replace_durably
from lightning_asyncpp.storage.errors import StorageError
from lightning_asyncpp.storage.names import aside_of, beside, check_replaceable, remove, remove_leftovers
from lightning_asyncpp.storage.seal import Done, write_sealed

_ARCHIVE, _PICKLE = b"PK\3\4", b"\x80"
_COLOURS = re.compile("\x1b\\[[0-9;]*m")


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


def not_written(path: Path, error: BaseException) -> StorageError:
    """The error to raise where a checkpoint could not be written."""
    reason = next(iter(str(error).strip().splitlines()), repr(error))
    kind = "" if isinstance(error, StorageError) else f"{type(error).__name__}: "
    before = "; what has that name is as complete as it was" if os.path.lexists(path) else ""
    return StorageError(f"the checkpoint {path} could not be written: {kind}{reason}{before}")


def load_file(path: Path, weights_only: bool | None = None, map_location: Any = "cpu") -> Any:
    """Read a checkpoint; its tensors are mapped into memory, and copied when they are used.

    Args:
        path: the file.
        weights_only: False runs code that the file may hold; anything else refuses it.
        map_location: as in ``torch.load``.

    Raises:
        StorageError: it is none, is damaged, or holds code.
    """
    if not path.exists():
        raise missing(path)
    safe = weights_only is not False
    try:
        return torch.load(path, map_location=map_location, weights_only=safe, mmap=_is_archive(path) or None)
    except Exception as error:  # a damaged file may be taken for any sequence of the unpickler's instructions
        raise unreadable_file(path, error) from error


def missing(path: Path) -> StorageError:
    """The error to raise where there is no checkpoint; it names the one that lost its name to an interrupted save."""
    aside = "".join(
        f", but {other.name} was moved aside by a save that was interrupted and had this name: rename it"
        for other in aside_of(path)[-1:]
    )
    return StorageError(f"there is no checkpoint {path}{aside}")


def unreadable(path: Path, error: BaseException) -> StorageError:
    """The error to raise where a checkpoint could not be read."""
    reason = next(iter(_COLOURS.sub("", str(error)).strip().splitlines()), repr(error))
    if isinstance(error, pickle.UnpicklingError):
        return StorageError(
            f"{path} cannot be read without running code that it may hold: {reason}. If it is yours and you trust it,"
            " pass weights_only=False to what loads it in Python"
        )
    return StorageError(f"{path} is damaged or no checkpoint: {type(error).__name__}: {reason}")


def unreadable_file(path: Path, error: BaseException) -> StorageError:
    """The error to raise where a file of torch could not be read, in words if it is none, or not all of one."""
    # Of a text torch would advise to run its code, and of other things it says what its unpickler stumbled over.
    if reason := _looks_wrong(path):
        return StorageError(f"{path} is damaged or no checkpoint: {reason}")
    return unreadable(path, error)


def _is_archive(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # it is one, of which a byte changed
        return True


def _looks_wrong(path: Path) -> str:
    """Why a file is neither a zip archive nor a pickle, which are what torch writes; nothing if it looks like one."""
    with path.open("rb") as file:
        start = file.read(len(_ARCHIVE))
    if not start:
        return "it is empty"
    if start[:1] == _PICKLE or _is_archive(path):
        return ""
    return "its end is missing" if start == _ARCHIVE else "it does not begin as a file of torch does"
