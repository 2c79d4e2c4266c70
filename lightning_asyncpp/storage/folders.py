"""A checkpoint as a folder: of every stage a file of ``torch.save`` with its part, and an index of them.

Who reads it merges the parts by their keys. A new save puts its files beside the old ones, under names of its own, and
replaces ``index.json`` last: until then the folder is what it was.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_asyncpp.storage.durable import is_folder, make_folder, remove, replace_durably, sync, write_durably
from lightning_asyncpp.storage.files import (
    INDEX,
    PART,
    StorageError,
    beside,
    check_replaceable,
    foreign_files,
    not_written,
    read_file,
    remove_leftovers,
    unreadable,
)

FORMAT = "lightning_asyncpp.sharded"
VERSION = 2


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


def load(path: Path, weights_only: bool | None = None) -> Any:
    """Read a checkpoint, all of it; tensors are mapped into memory, so that what is not used is not read.

    Args:
        path: a file, or a folder with an index.
        weights_only: False lets a single file run code; a sharded checkpoint has none.

    Raises:
        StorageError: it is none, is damaged, or holds code; or a file of it is missing, or has another size than the
            index says.
    """
    if not os.path.isdir(path):
        return read_file(path, weights_only)
    files = read_index(path)
    for name, size in files.items():
        if not (path / name).is_file():
            raise StorageError(f"{path / name} is missing, though {INDEX} names it")
        if (found := (path / name).stat().st_size) != size:
            raise StorageError(f"{path / name} has {found} bytes, and had {size} when it was written")
    return merged([read_file(path / name) for name in files])


def merged(parts: Sequence[Any]) -> Any:
    """Join nested dictionaries, and lists of the same length; where several have a value, the last one's counts."""
    first, *others = parts
    for other in others:
        first = _merge(first, other)
    return first


def is_sharded(path: Path) -> bool:
    """Whether it is a folder with an index; of one that nobody may look into it cannot be told."""
    with suppress(OSError):
        return (path / INDEX).is_file()
    return False


def read_index(folder: Path) -> dict[str, int]:
    """The files of a sharded checkpoint, by stages, with their sizes.

    Raises:
        StorageError: the index is missing, or none.
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
    files = index.get("files")
    if not isinstance(files, dict) or not files or not all(map(PART.fullmatch, files)):
        raise StorageError(f"{folder / INDEX} is damaged or no checkpoint: it does not name files of this folder")
    return files


def new_target(path: Path) -> Target:
    """Choose where a save goes; on one rank, which tells the others. Leftovers of earlier ones are removed.

    Raises:
        StorageError: it cannot go there: ``path`` is a folder of something else, or there can be none.
    """
    try:
        make_folder(path.parent)
        remove_leftovers(path)
        if not _named_files(path):
            check_replaceable(path)
    except OSError as error:
        raise not_written(path, error) from error
    folder = path if is_folder(path) else beside(path)
    return Target(str(path), str(folder), secrets.token_hex(6))


def write_part(target: Target, stage: int, part: Mapping[str, Any]) -> tuple[str, int]:
    """Write what one stage has to the disk.

    Args:
        target: of :func:`new_target`.
        stage: its index.
        part: what ``torch.save`` takes.

    Returns:
        The file's name in the folder, and its size.

    Raises:
        StorageError: it cannot be written.
    """
    file = Path(target.folder) / f"{target.save}-stage-{stage:04d}.pt"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(dict(part), file)
        sync(file)
        return file.name, file.stat().st_size
    except (OSError, RuntimeError) as error:
        remove(file)
        raise not_written(Path(target.path), error) from error


def commit(target: Target, files: Mapping[str, int]) -> None:
    """Make a save whose parts are written the folder's content.

    Args:
        target: of :func:`new_target`.
        files: of all stages, the first one first, with their sizes.

    Raises:
        StorageError: it cannot be written, or a file is not there; the checkpoint is what it was.
    """
    path, folder = Path(target.path), Path(target.folder)
    index = {"format": FORMAT, "version": VERSION, "files": dict(files)}
    try:
        if missing := [name for name in files if not (folder / name).is_file()]:
            raise StorageError(f"{', '.join(missing)} is not there: all machines must see the same folder")
        sync(folder)  # before the index: it must not outlive the loss of power alone
        write_durably(folder / INDEX, json.dumps(index, indent=2).encode())
        if folder != path:
            replace_durably(folder, path)
    except OSError as error:
        raise not_written(path, error) from error
    _remove_others(path, kept={INDEX, *files})


def give_up(target: Target) -> None:
    """Remove what a save has written that was not committed."""
    folder = Path(target.folder)
    if target.folder != target.path:
        remove(folder)
        return
    named = _named_files(folder)  # the last step that can fail follows the new index
    for file in folder.glob(f"{target.save}-*"):
        if file.name not in named:
            remove(file)


def remove_sharded(path: Path) -> None:
    """Remove a checkpoint, all of it at once as far as its name goes; of a link to one, the link."""
    if is_folder(path):
        aside = beside(path)
        with suppress(OSError):
            os.replace(path, aside)
            sync(path.parent)
        remove(aside)
    remove(path)


def _named_files(folder: Path) -> set[str]:
    """The files of the checkpoint in a folder, its index among them; none if there is none that can be read."""
    try:
        return {INDEX, *read_index(folder)}
    except OSError:
        return set()


def _remove_others(folder: Path, kept: Collection[str]) -> None:
    """Remove what saves, complete or not, left in a folder; what cannot be removed is in nobody's way."""
    with suppress(OSError):
        for name in {*os.listdir(folder)} - {*kept, *foreign_files(folder)}:
            remove(folder / name)


def _merge(first: Any, second: Any) -> Any:
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        both = {key: _merge(first[key], second[key]) for key in first.keys() & second.keys()}
        return {**first, **second, **both}
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return [_merge(*pair) for pair in zip(first, second)]
    return second
