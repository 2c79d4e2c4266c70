"""Paths as Lightning's users give them: of this machine's file systems, or URLs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem


def local_path(path: Any) -> Path | None:
    """The path, if it is one of a file system of this machine."""
    files, name = url_to_fs(str(path))
    return Path(name) if isinstance(files, LocalFileSystem) else None
