"""Files that are there whole or not at all, also after the machine lost its power.

A rename is atomic, but a file system may write it down before the content of what was renamed.
"""

from __future__ import annotations

import os
from pathlib import Path


def replace_durably(written: Path, name: Path) -> None:
    """Rename a file, or a folder with all that is in it, once its content is on the disk.

    Args:
        written: what is complete.
        name: its final name, in the same file system; a file or an empty folder of that name is replaced.

    Raises:
        OSError: the content cannot be written, or ``name`` is a folder with something in it, and nothing is renamed; or
            the folder around them cannot be written down.
    """
    for path in sorted(written.rglob("*"), reverse=True) if written.is_dir() else ():
        _sync(path)
    _sync(written)
    os.replace(written, name)
    _sync(name.parent)
    if written.parent != name.parent:
        _sync(written.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
