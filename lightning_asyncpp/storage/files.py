"""A checkpoint in one file of ``torch.save``, and what paths and errors of all checkpoints have in common."""

from __future__ import annotations

import errno
import os
import pickle
import re
import secrets
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from safetensors.torch import load_file as load_safetensors

from lightning_asyncpp.storage.durable import is_folder, make_folder, remove, replace_durably

INDEX = "index.json"
"""Names the files that belong to a sharded checkpoint."""
PART = re.compile(r"[0-9a-f]{12}-stage-\d{4,}\.pt")
"""Names of files of a sharded checkpoint: of a save, and a stage."""
_INTERRUPTED = re.compile(rf"\.{re.escape(INDEX)}\.[0-9a-f]{{8}}")
_PARTIAL = ".partial"  # ends the names of files and folders that are not complete
_ARCHIVE, _PICKLE = b"PK\3\4", b"\x80"
_SAFETENSORS = ".safetensors"
_COLOURS = re.compile("\x1b\\[[0-9;]*m")


class StorageError(OSError):
    """Can this checkpoint be written, or read? Names the file, what is wrong with it, and what to do."""


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
    """Write a file under another name, and give it its own at the end; nothing is left behind otherwise.

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


def local_path(path: Any) -> Path | None:
    """The path, if it is one of a file system of this machine."""
    files, name = url_to_fs(str(path))
    return Path(name) if isinstance(files, LocalFileSystem) else None


def beside(path: Path) -> Path:
    """A name beside it for what is not complete."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{_PARTIAL}")


def remove_leftovers(path: Path) -> None:
    """Remove what earlier attempts to write ``path`` left, which ended with their process."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}{re.escape(_PARTIAL)}")
    for name in os.listdir(path.parent) if path.parent.is_dir() else []:
        if pattern.fullmatch(name):
            remove(path.with_name(name))


def foreign_files(folder: Path) -> list[str]:
    """What is in a folder that no sharded checkpoint consists of; nothing if there is no such folder."""
    names = os.listdir(folder) if is_folder(folder) else []
    return sorted(n for n in names if n != INDEX and not PART.fullmatch(n) and not _INTERRUPTED.fullmatch(n))


def check_replaceable(path: Path) -> None:
    """Refuse to write a checkpoint over a folder of something else.

    Raises:
        StorageError: there is one.
    """
    if foreign := foreign_files(path):
        names = f"{', '.join(foreign[:3])}{', ...' if foreign[3:] else ''}"
        raise StorageError(f"it is a folder that holds something else ({names}); name another path")


def not_written(path: Path, error: BaseException) -> StorageError:
    """The error to raise where a checkpoint could not be written."""
    reason = next(iter(str(error).strip().splitlines()), repr(error))
    kind = "" if isinstance(error, StorageError) else f"{type(error).__name__}: "
    before = "; what has that name is as complete as it was" if os.path.lexists(path) else ""
    return StorageError(f"the checkpoint {path} could not be written: {kind}{reason}{before}")


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
