"""Reads a checkpoint, in one file or sharded, without running code that it may hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_asyncpp.storage.durable import checksum
from lightning_asyncpp.storage.names import INDEX, StorageError
from lightning_asyncpp.storage.nested import STORED, entry_dtype, entry_shape, put_together, shard_of
from lightning_asyncpp.storage.sharded import Shard, files_of, read_index
from lightning_asyncpp.storage.whole import damage_of, load_file, missing, unreadable, unreadable_file


def load(path: Path, weights_only: bool | None = None) -> Any:
    """Read a checkpoint, all of it; tensors are mapped into memory, so that what is not used is not read.

    Args:
        path: a file, or a folder with an index.
        weights_only: False lets a single file run code; a sharded checkpoint has none.

    Raises:
        StorageError: it is none, is damaged, or holds code.
    """
    return load_sharded(path) if path.is_dir() else load_file(path, weights_only)


def load_sharded(folder: Path) -> Any:
    """Read a sharded checkpoint.

    Raises:
        StorageError: a file is missing, has another size than the index says, or does not hold what it should.
    """
    index = read_index(folder)
    run, shards = files_of(index, folder)
    for shard in (run, *shards):
        _check_size(folder, shard)
    skeleton = load_file(folder / run.file, weights_only=True)
    with _opened(folder, shards) as tensor_of:
        try:
            return put_together(skeleton, tensor_of)
        except RecursionError as error:  # a list that holds itself
            raise unreadable(folder / run.file, error) from error


def verify(path: Path, done: Callable[[int], object] = lambda num_bytes: None) -> list[str]:
    """Read all of a checkpoint and compare it with its checksums.

    Args:
        path: a file, or a folder with an index.
        done: called with the number of bytes of every file that was read.

    Returns:
        What is wrong with it; nothing if it is whole.
    """
    try:
        problems = damages(path, done)
        if not problems:
            load(path)
    except StorageError as error:
        problems = [str(error)]
    return problems


def damages(
    path: Path, done: Callable[[int], object] = lambda num_bytes: None, part: int = 0, parts: int = 1
) -> list[str]:
    """Compare the files of a checkpoint with their checksums, or every ``parts``-th of them.

    Args:
        path: a file, or a folder with an index.
        done: called with the number of bytes of every file that was read.
        part: the first of them; a single file is that of part 0.
        parts: among how many readers the files are divided.

    Returns:
        What is wrong with them, a text for each.

    Raises:
        StorageError: it is no checkpoint.
    """
    if path.is_dir():
        run, shards = files_of(read_index(path), path)
        return [problem for shard in (run, *shards)[part::parts] for problem in _damaged_part(path, shard, done)]
    return [] if part else _damaged_file(path, done)


def _damaged_file(path: Path, done: Callable[[int], object]) -> list[str]:
    if not path.exists():
        raise missing(path)
    try:
        damage = damage_of(path)
    except Exception as error:  # whatever a damaged archive is taken for
        raise unreadable_file(path, error) from error
    done(path.stat().st_size)
    return [f"{path} is damaged: {damage}"] if damage else []


def _damaged_part(folder: Path, shard: Shard, done: Callable[[int], object]) -> list[str]:
    try:
        _check_size(folder, shard)
    except StorageError as error:
        return [str(error)]
    found = checksum(folder / shard.file)
    done(shard.num_bytes)
    if found == shard.crc32:
        return []
    return [f"{folder / shard.file} is damaged: its CRC-32 is {found}, and was {shard.crc32} when it was written"]


def _check_size(folder: Path, shard: Shard) -> None:
    path = folder / shard.file
    if not path.is_file():
        raise StorageError(f"{path} is missing, though {INDEX} names it")
    if path.stat().st_size != shard.num_bytes:
        raise StorageError(f"{path} has {path.stat().st_size} bytes, and had {shard.num_bytes} when it was written")


@contextmanager
def _opened(folder: Path, shards: list[Shard]) -> Iterator[Any]:
    files = {}
    known: dict[tuple[str, str], Tensor] = {}  # at several places the same one, as in a single file
    for shard in shards:
        try:
            files[shard.name] = safe_open(folder / shard.file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise unreadable(folder / shard.file, error) from error

    def tensor_of(entry: Mapping[str, Any]) -> Tensor:
        try:
            if (place := (shard_of(entry), entry[STORED])) not in known:
                known[place] = files[place[0]].get_tensor(place[1])
            tensor = known[place]
            if tuple(tensor.shape) != entry_shape(entry) or tensor.dtype != entry_dtype(entry):
                raise ValueError(f"{entry[STORED]} has another shape or dtype than was saved")
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise unreadable(folder, error) from error
        return tensor

    yield tensor_of
