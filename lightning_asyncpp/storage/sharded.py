"""A checkpoint as a folder, of which every stage writes its part.

``index.json`` names the files that belong to it, with their sizes: one of tensors per stage, in the
safetensors format, and ``run``, in torch's, with all that is small: the skeleton, in which tensors are named, and what
else is no tensor. A new save puts its files beside the old ones, under names of its own, and replaces the index last:
until then the folder is what it was.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file as save_tensors
from torch import Tensor

from lightning_asyncpp.storage.durable import make_folder, replace_durably, sync, usual_mode, write_durably
from lightning_asyncpp.storage.names import (
    INDEX,
    StorageError,
    beside,
    check_replaceable,
    foreign_files,
    is_folder,
    remove,
    remove_leftovers,
)
from lightning_asyncpp.storage.whole import not_written, unreadable

FORMAT = "lightning_asyncpp.sharded"
VERSION = 1
_TYPES = {"name": str, "file": str, "num_bytes": int}
_SAVE_BYTES = 6


class Shard(NamedTuple):
    """A file of a sharded checkpoint, as the index has it.

    Attributes:
        name: what the skeleton calls it.
        file: its name in the folder.
        num_bytes: its size.
    """

    name: str
    file: str
    num_bytes: int


class Target(NamedTuple):
    """Where a save goes, the same on all stages.

    Attributes:
        path: the checkpoint.
        folder: where its files are written: that, if it is there, or else another folder that takes its place.
        save: a name of the save, which its files have in theirs.
    """

    path: str
    folder: str
    save: str


def is_sharded(path: Path) -> bool:
    """Whether it is a folder with an index; of one that nobody may look into it cannot be told."""
    with suppress(OSError):
        return (path / INDEX).is_file()
    return False


def index_bytes(run: Shard, shards: Sequence[Shard], about: Mapping[str, Any]) -> bytes:
    """The content of an index.

    Args:
        run: the file of what is small.
        shards: those of tensors.
        about: facts for whoever looks into the index, as JSON has them.
    """
    index = {
        "format": FORMAT, "version": VERSION, "about": dict(about),
        "run": run._asdict(), "shards": [shard._asdict() for shard in shards],
    }  # fmt: skip
    return json.dumps(index, indent=2).encode()


def read_index(folder: Path) -> dict[str, Any]:
    """Read the index of a sharded checkpoint.

    Raises:
        StorageError: it is missing, or none.
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


def new_target(path: Path) -> Target:
    """Choose where a save goes; on one rank, which tells the others. Leftovers of earlier ones are removed.

    Raises:
        StorageError: it cannot go there: ``path`` is a folder of something else, or there can be none.
    """
    try:
        make_folder(path.parent)
        remove_leftovers(path)
        if not _has_index(path):
            check_replaceable(path)
    except OSError as error:
        raise not_written(path, error) from error
    folder = path if is_folder(path) else beside(path)
    return Target(str(path), str(folder), secrets.token_hex(_SAVE_BYTES))


def shard_name(stage: int) -> str:
    """What the part of a stage is called."""
    return f"stage-{stage:04d}"


def write_shard(target: Target, name: str, tensors: Mapping[str, Tensor]) -> Shard:
    """Write the tensors of one stage to the disk.

    Args:
        target: of :func:`new_target`.
        name: of :func:`shard_name`.
        tensors: name -> tensor on the host.

    Raises:
        StorageError: they cannot be written.
    """
    folder = Path(target.folder)
    file = folder / f"{target.save}-{name}.safetensors"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with usual_mode(file):
            save_tensors({key: tensor.contiguous() for key, tensor in without_aliases(tensors).items()}, file)
        sync(file)
        return _described(name, file)
    except (OSError, SafetensorError) as error:
        remove(file)
        raise not_written(Path(target.path), error) from error


def commit(target: Target, shards: Sequence[Shard], run: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Write what else belongs to a checkpoint whose shards are written, and make all of it the folder's content.

    Args:
        target: of :func:`new_target`.
        shards: of all stages.
        run: what ``torch.save`` takes.
        about: facts for whoever looks into the index, as JSON has them.

    Raises:
        StorageError: it cannot be written, or a shard is not there; the checkpoint is what it was.
    """
    path, folder = Path(target.path), Path(target.folder)
    file = folder / f"{target.save}-run.pt"
    try:
        if missing := [shard.file for shard in shards if not (folder / shard.file).is_file()]:
            raise StorageError(f"{', '.join(missing)} is not there: all machines must see the same folder")
        torch.save(dict(run), file)
        sync(file)
        sync(folder)  # before the index: it must not outlive the loss of power alone
        write_durably(folder / INDEX, index_bytes(_described("run", file), shards, about))
        if folder != path:
            replace_durably(folder, path)
    except (OSError, RuntimeError) as error:
        raise not_written(path, error) from error
    _remove_own(path, kept={INDEX, file.name, *(shard.file for shard in shards)})


def give_up(target: Target) -> None:
    """Remove what a save has written that was not committed."""
    folder = Path(target.folder)
    if target.folder != target.path:
        remove(folder)
        return
    with suppress(OSError):
        named = named_files(folder)  # the last step that can fail follows the new index
        _remove_files(folder, lambda name: name.startswith(target.save) and name not in named)


def without_aliases(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Views of one storage as tensors of their own: the format of safetensors has no others."""
    seen: set[int] = set()
    own: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        whole = tensor.is_contiguous() and storage.nbytes() == tensor.nbytes and storage.data_ptr() not in seen
        seen.add(storage.data_ptr())
        own[name] = tensor if whole else tensor.clone(memory_format=torch.contiguous_format)
    return own


def remove_sharded(path: Path) -> None:
    """Remove a checkpoint, all of it at once as far as its name goes; of a link to one, the link."""
    if not is_folder(path):
        remove(path)
        return
    if foreign_files(path):
        remove(path / INDEX)
        _remove_own(path, kept=set())
        return
    aside = beside(path)
    with suppress(OSError):
        os.replace(path, aside)
        sync(path.parent)
    for folder in (aside, path):
        shutil.rmtree(folder, ignore_errors=True)


def _shard(entry: Any) -> Shard:
    shard = Shard(**entry)
    if any(type(getattr(shard, name)) is not kind for name, kind in _TYPES.items()):
        raise ValueError(f"{entry!r} does not describe a file")
    if Path(shard.file).name != shard.file or shard.file in ("", "..") or "\0" in shard.file:  # out of the folder
        raise ValueError(f"{shard.file!r} is no file of this folder")
    return shard


def _described(name: str, file: Path) -> Shard:
    return Shard(name, file.name, file.stat().st_size)


def _has_index(folder: Path) -> bool:
    try:
        return bool(named_files(folder))
    except StorageError:
        return False


def _remove_own(folder: Path, kept: set[str]) -> None:
    """Remove what saves, complete or not, left in a folder."""
    with suppress(OSError):
        kept = kept | set(foreign_files(folder))
        _remove_files(folder, lambda name: name not in kept)


def _remove_files(folder: Path, which: Callable[[str], bool]) -> None:
    """Remove files that are not needed; one that cannot be is in nobody's way."""
    with suppress(OSError):
        for name in os.listdir(folder):
            if which(name):
                remove(folder / name)
