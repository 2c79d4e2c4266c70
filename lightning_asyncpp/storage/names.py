"""Names, paths and errors of checkpoints on disk.

Paths are what Lightning's users give, of this machine's file systems or URLs. A name tells what is complete, what is
not yet, and what is not ours.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

PARTIAL = ".partial"
"""Ends the names of files and folders that are not complete."""
INDEX = "index.json"
"""Names the files that belong to a sharded checkpoint."""
# The last two are what an interrupted save leaves: of the index, and of safetensors.
_OWN = re.compile(r"index\.json|[0-9a-f]{12}-(run\.pt|stage-\d{4,}\.safetensors)|\.index\.json\.[0-9a-f]{8}|\.tmp\w{6}")


class StorageError(OSError):
    """Can this checkpoint be written, or read? Names the file, what is wrong with it, and the mend."""


def local_path(path: Any) -> Path | None:
    """The path, if it is one of a file system of this machine."""
    files, name = url_to_fs(str(path))
    return Path(name) if isinstance(files, LocalFileSystem) else None


def beside(path: Path) -> Path:
    """A name beside it for what is not complete."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")


def is_folder(path: Path) -> bool:
    """Whether it is a folder, and not a link to one."""
    return path.is_dir() and not path.is_symlink()


def foreign_files(folder: Path) -> list[str]:
    """What is in a folder that no sharded checkpoint consists of; nothing if there is no such folder."""
    return sorted(name for name in os.listdir(folder) if not _OWN.fullmatch(name)) if is_folder(folder) else []


def check_replaceable(path: Path) -> None:
    """Refuse to write a checkpoint over a folder of something else.

    Raises:
        StorageError: there is one.
    """
    if foreign := foreign_files(path):
        raise StorageError(
            f"it is a folder that holds something else ({', '.join(foreign[:3])}{', ...' if foreign[3:] else ''});"
            " name another path"
        )


def remove_leftovers(path: Path) -> None:
    """Remove what earlier attempts to write ``path`` left, which ended with their process."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}{re.escape(PARTIAL)}")
    for name in os.listdir(path.parent) if path.parent.is_dir() else []:
        if pattern.fullmatch(name):
            remove(path.with_name(name))


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there and can be."""
    with suppress(OSError):
        if is_folder(path):
            shutil.rmtree(path)
        else:
            path.unlink()
