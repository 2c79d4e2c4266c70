"""A checkpoint as a folder, of which every stage writes its part.

``index.json`` names the files that belong to it: one of tensors per stage, in the safetensors format, and ``run``, in
torch's, with all that is small: the skeleton, in which tensors are named, and what else is no tensor. A new save puts
its files beside the old ones, under names of its own, and replaces the index last: until then the folder is what it
was.
"""

from __future__ import annotations

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

from lightning_asyncpp.durable import checksum, make_folder, replace_durably, sync, usual_mode, write_durably
from lightning_asyncpp.storage.errors import StorageError
from lightning_asyncpp.storage.index import Shard, index_bytes, named_files
from lightning_asyncpp.storage.names import (
    INDEX,
    beside,
    check_replaceable,
    foreign_files,
    is_folder,
    remove,
    remove_leftovers,
)
from lightning_asyncpp.storage.seal import write_sealed
from lightning_asyncpp.storage.whole import not_written

_SAVE_BYTES = 6


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
        write_sealed(dict(run), file)
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


def _described(name: str, file: Path) -> Shard:
    return Shard(name, file.name, file.stat().st_size, checksum(file))


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
