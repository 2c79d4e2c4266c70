"""Reads a checkpoint, in one file or sharded, without running code that it may hold."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_asyncpp.storage.names import INDEX, StorageError
from lightning_asyncpp.storage.nested import STORED, entry_dtype, entry_shape, put_together, shard_of
from lightning_asyncpp.storage.sharded import Shard, files_of, read_index
from lightning_asyncpp.storage.whole import read_file, unreadable


def load(path: Path, weights_only: bool | None = None) -> Any:
    """Read a checkpoint, all of it; tensors are mapped into memory, so that what is not used is not read.

    Args:
        path: a file, or a folder with an index.
        weights_only: False lets a single file run code; a sharded checkpoint has none.

    Raises:
        StorageError: it is none, is damaged, or holds code; or a file of it is missing, has another size than the
            index says, or does not hold what it should.
    """
    return _load_folder(path) if os.path.isdir(path) else read_file(path, weights_only)


def _load_folder(folder: Path) -> Any:
    run, shards = files_of(read_index(folder), folder)
    skeleton = read_file(_file_of(folder, run))
    return put_together(skeleton, _Tensors(folder, {shard.name: _tensors(_file_of(folder, shard)) for shard in shards}))


def _file_of(folder: Path, shard: Shard) -> Path:
    path = folder / shard.file
    if not path.is_file():
        raise StorageError(f"{path} is missing, though {INDEX} names it")
    if (size := path.stat().st_size) != shard.num_bytes:
        raise StorageError(f"{path} has {size} bytes, and had {shard.num_bytes} when it was written")
    return path


def _tensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise unreadable(path, error) from error


class _Tensors:
    """Gives the tensor that an entry of a skeleton stands for; at several places the same one, as in a single file.

    Args:
        folder: of the checkpoint, for messages.
        files: name of a shard -> the tensors in it.
    """

    def __init__(self, folder: Path, files: Mapping[str, Any]) -> None:
        self._folder, self._files = folder, files
        self._known: dict[tuple[str, str], Tensor] = {}

    def __call__(self, entry: Mapping[str, Any]) -> Tensor:
        try:
            if (place := (shard_of(entry), entry[STORED])) not in self._known:
                self._known[place] = self._files[place[0]].get_tensor(place[1])
            tensor = self._known[place]
            if tuple(tensor.shape) != entry_shape(entry) or tensor.dtype != entry_dtype(entry):
                raise ValueError(f"{entry[STORED]} has another shape or dtype than was saved")
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise unreadable(self._folder, error) from error
        return tensor
