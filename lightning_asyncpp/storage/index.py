"""The index of a sharded checkpoint: which files belong to it, how large they are, and their checksums."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning_asyncpp.storage.errors import StorageError
from lightning_asyncpp.storage.names import INDEX
from lightning_asyncpp.storage.whole import unreadable

FORMAT = "lightning_asyncpp.sharded"
VERSION = 1
_CHECKSUM, _NOT_YET = "crc32", "00000000"  # of the index itself, with this in its place


class Shard(NamedTuple):
    """A file of a sharded checkpoint, as the index has it.

    Attributes:
        name: what the skeleton calls it.
        file: its name in the folder.
        num_bytes: its size.
        crc32: its CRC-32, in hexadecimal.
    """

    name: str
    file: str
    num_bytes: int
    crc32: str


_TYPES = {"name": str, "file": str, "num_bytes": int, "crc32": str}


def is_sharded(path: Path) -> bool:
    """Whether it is a folder with an index."""
    return (path / INDEX).is_file()


def index_bytes(run: Shard, shards: Sequence[Shard], about: Mapping[str, Any]) -> bytes:
    """The content of an index.

    Args:
        run: the file of what is small.
        shards: those of tensors.
        about: facts for whoever looks into the index, as JSON has them.
    """
    index = {
        "format": FORMAT, "version": VERSION, "about": dict(about),
        "run": run._asdict(), "shards": [shard._asdict() for shard in shards], _CHECKSUM: _NOT_YET,
    }  # fmt: skip
    text = json.dumps(index, indent=2).encode()
    before, _, after = text.rpartition(_NOT_YET.encode())
    return before + b"%08x" % zlib.crc32(text) + after


def read_index(folder: Path) -> dict[str, Any]:
    """Read the index of a sharded checkpoint.

    Raises:
        StorageError: it is missing, damaged, or none.
    """
    if not is_sharded(folder):
        raise StorageError(
            f"{folder} is a folder without {INDEX}: no checkpoint, or one whose writing was never completed"
        )
    text = (folder / INDEX).read_bytes()
    try:
        index = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise unreadable(folder / INDEX, error) from error
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise StorageError(f"{folder / INDEX} is not the index of a sharded checkpoint of this package")
    if index.get("version") != VERSION:
        raise StorageError(
            f"{folder} has version {index.get('version')!r} of the sharded format, and this release reads {VERSION}:"
            " use the release that wrote it"
        )
    written = str(index.get(_CHECKSUM)).encode()
    before, _, after = text.rpartition(written)
    if b"%08x" % zlib.crc32(before + _NOT_YET.encode() + after) != written:
        raise StorageError(f"{folder / INDEX} is damaged: it differs from its CRC-32, {index.get(_CHECKSUM)}")
    return index


def files_of(index: Mapping[str, Any], folder: Path) -> tuple[Shard, list[Shard]]:
    """The file of what is small, and those of tensors.

    Raises:
        StorageError: the index does not say so properly.
    """
    try:
        run, *shards = (_shard(entry) for entry in (index["run"], *index["shards"]))
    except (KeyError, TypeError, ValueError) as error:
        raise unreadable(folder / INDEX, error) from error
    return run, shards


def named_files(folder: Path) -> set[str]:
    """Names of the files that an index names, and its own; nothing if there is no index.

    Raises:
        StorageError: it cannot be read.
    """
    if not is_sharded(folder):
        return set()
    run, shards = files_of(read_index(folder), folder)
    return {INDEX, run.file, *(shard.file for shard in shards)}


def _shard(entry: Any) -> Shard:
    shard = Shard(**entry)
    if any(type(getattr(shard, name)) is not kind for name, kind in _TYPES.items()):
        raise ValueError(f"{entry!r} does not describe a file")
    if Path(shard.file).name != shard.file or shard.file in ("", "..") or "\0" in shard.file:  # out of the folder
        raise ValueError(f"{shard.file!r} is no file of this folder")
    return shard
