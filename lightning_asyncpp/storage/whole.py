"""A checkpoint in one file of ``torch.save``."""

from __future__ import annotations

import errno
import os
import pickle
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file as load_safetensors

from lightning_asyncpp.storage.durable import make_folder, replace_durably
from lightning_asyncpp.storage.names import StorageError, beside, check_replaceable, remove, remove_leftovers

_ARCHIVE, _PICKLE = b"PK\3\4", b"\x80"
_SAFETENSORS = ".safetensors"
_COLOURS = re.compile("\x1b\\[[0-9;]*m")


def save_file(content: Any, path: Path) -> None:
    """Write a checkpoint; a file of that name stays as it is until the new one is complete and on the disk.

    Args:
        content: what ``torch.save`` takes.
        path: the file; its folder is made.

    Raises:
        StorageError: it cannot be written.
    """
    with written_beside(path) as partial:
        torch.save(content, partial)


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


def not_written(path: Path, error: BaseException) -> StorageError:
    """The error to raise where a checkpoint could not be written."""
    reason = next(iter(str(error).strip().splitlines()), repr(error))
    kind = "" if isinstance(error, StorageError) else f"{type(error).__name__}: "
    before = "; what has that name is as complete as it was" if os.path.lexists(path) else ""
    return StorageError(f"the checkpoint {path} could not be written: {kind}{reason}{before}")


def no_regular_file(path: Path) -> str:
    """What is wrong with a pipe, a device and the like."""
    return f"{path} is no regular file: name a checkpoint, or a copy of what comes from there"


def unreadable(path: Path, error: BaseException) -> StorageError:
    """The error to raise where a checkpoint could not be read."""
    if isinstance(error, FileNotFoundError):
        return StorageError(f"there is no checkpoint {path}")
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


def _looks_wrong(path: Path) -> str:
    """Why a file is neither a zip archive nor a pickle, which are what torch writes; nothing if it looks like one."""
    with path.open("rb") as file:
        start = file.read(len(_ARCHIVE))
    if not start:
        return "it is empty"
    if path.suffix == _SAFETENSORS or start[:1] == _PICKLE or zipfile.is_zipfile(path):
        return ""
    return "its end is missing" if start == _ARCHIVE else "it does not begin as a file of torch does"
