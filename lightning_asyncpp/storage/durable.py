"""Files that are there whole or not at all, also after the machine lost its power.

A rename is atomic, but a file system may write it down before the content of what was renamed.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def replace_durably(written: Path, name: Path) -> None:
    """Rename a file, or a folder with all that is in it, once its content is on the disk.

    Args:
        written: what is complete.
        name: its final name, in the same file system; what has that name is replaced, but a folder with something in it
            not by another folder. Only a file and a folder do not replace each other at once.

    Raises:
        OSError: the content cannot be written, or ``name`` is a folder with something in it, and nothing is renamed; or
            the folder around them cannot be written down.
    """
    for path in sorted(written.rglob("*"), reverse=True) if written.is_dir() else ():
        sync(path)
    sync(written)
    if os.path.lexists(name) and is_folder(written) != is_folder(name):
        shutil.rmtree(name) if is_folder(name) else name.unlink()
    os.replace(written, name)
    sync(name.parent)
    if written.parent != name.parent:
        sync(written.parent)


def write_durably(path: Path, content: bytes) -> None:
    """Write a small file; one of that name stays what it is until the new one is on the disk.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        partial.write_bytes(content)
        replace_durably(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def usual_mode(file: Path) -> Iterator[None]:
    """Let others read a file that is written meanwhile as they may read any new file; safetensors lets nobody else.

    Raises:
        OSError: there can be no such file.
    """
    file.touch()
    mode = stat.S_IMODE(file.stat().st_mode)
    yield
    file.chmod(mode)


def make_folder(path: Path) -> None:
    """Make a folder, and those that it is in, if they are not there, and wait until that is on the disk.

    Raises:
        OSError: it cannot be made.
    """
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync(path.parent)


def is_folder(path: Path) -> bool:
    """Whether it is a folder, and not a link to one."""
    return path.is_dir() and not path.is_symlink()


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there and can be."""
    with suppress(OSError):
        shutil.rmtree(path) if is_folder(path) else path.unlink()


def sync(path: Path) -> None:
    """Wait until a file, or the list of what is in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
