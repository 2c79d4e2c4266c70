"""Reads a checkpoint, in one file or sharded, without running code that it may hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_asyncpp.storage.names import StorageError
from lightning_asyncpp.storage.opened import opened


def load(path: Path, weights_only: bool | None = None) -> Any:
    """Read a checkpoint, all of it; tensors are mapped into memory, so that what is not used is not read.

    Args:
        path: a file, or a folder with an index.
        weights_only: False lets a single file run code; a sharded checkpoint has none.

    Raises:
        StorageError: it is none, is damaged, or holds code; or a file of it is missing, has another size than the
            index says, or does not hold what it should.
    """
    with opened(path) as checkpoint:
        return checkpoint.load(weights_only)


def verify(path: Path, done: Callable[[int], object] = lambda num_bytes: None) -> list[str]:
    """Read all of a checkpoint and compare it with its checksums.

    Args:
        path: a file, or a folder with an index.
        done: called with the number of bytes of every file that was read.

    Returns:
        What is wrong with it; nothing if it is whole.
    """
    try:
        with opened(path) as checkpoint:
            problems = checkpoint.damages(done)
            if not problems:
                checkpoint.load()
    except StorageError as error:
        problems = [str(error)]
    return problems


def damages(path: Path, done: Callable[[int], object] = lambda num_bytes: None) -> list[str]:
    """Compare the files of a checkpoint with their checksums, as :func:`verify` does; nothing else is read of them.

    Raises:
        StorageError: it is no checkpoint.
    """
    with opened(path) as checkpoint:
        return checkpoint.damages(done)
