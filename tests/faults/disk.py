"""Disk that is too small: a real file system of a given size, which only root can mount."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LARGE = 2**28


def size_of(folder: Path) -> int:
    """Return the number of bytes in files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def why_not() -> str:
    """Return why no small disk can be mounted here; an empty string if it can."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return "mounts a small file system, for which one has to be root"
    done = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True
    )
    return done.stderr.strip()


@contextmanager
def small(folder: Path, size: int) -> Iterator[None]:
    """Mount a disk of ``size`` bytes at an empty folder."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], check=True, timeout=30)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True, timeout=30)


def grow(folder: Path) -> None:
    """Enlarge the disk to 256 MiB."""
    subprocess.run(["mount", "-o", f"remount,size={_LARGE}", folder], check=True, timeout=30)
