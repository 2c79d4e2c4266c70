"""Checkpoints on disk: a file of ``torch.save``, or a folder of such files, one per stage; reading runs no code.

A file or folder is there whole or not at all, also after the machine lost its power: a rename is atomic, but a file
system may write it down before the content of what was renamed. Who reads a folder merges its parts by their keys. A
new save puts its files beside the old ones, under names of its own, and replaces ``index.json`` last: until then the
folder is what it was.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import secrets
import shutil
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from safetensors.torch import load_file as load_safetensors


def replace_durably(written: Path, name: Path) -> None:
    """Rename a file, or a folder with all that is in it, once its content is on the disk.

    Args:
        written: what is complete.
        name: its final name, in the same file system; what has that name is replaced, but a folder with something in it
            not by another folder. Only a file and a folder do not replace each other at once.

    Raises:
        OSError: the content cannot be written, or ``name`` is a folder with something in it, and nothing is renamed; or
            the folder around them cannot be written down.
    """
    for path in sorted(written.rglob("*"), reverse=True) if written.is_dir() else ():
        sync(path)
    sync(written)
    if os.path.lexists(name) and is_folder(written) != is_folder(name):
        shutil.rmtree(name) if is_folder(name) else name.unlink()
    os.replace(written, name)
    sync(name.parent)
    if written.parent != name.parent:
        sync(written.parent)


def make_folder(path: Path) -> None:
    """Make a folder, and those that it is in, if they are not there, and wait until that is on the disk.

    Raises:
        OSError: it cannot be made.
    """
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync(path.parent)


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder, and not a link to one."""
    return path.is_dir() and not path.is_symlink()


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there and can be."""
    with suppress(OSError):
        shutil.rmtree(path) if is_folder(path) else path.unlink()


def sync(path: Path) -> None:
    """Wait until a file, or the list of what is in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


INDEX = "index.json"
"""Names the files that belong to a sharded checkpoint."""
PART = re.compile(rf"[0-9a-f]{{12}}-(stage-\d{{4,}}\.pt|{re.escape(INDEX)})")
"""Names of files of a sharded checkpoint: of a save, and a stage; or an index that is not in its place yet."""
_PARTIAL = ".partial"  # ends the names of files and folders that are not complete


class StorageError(OSError):
    """Can this checkpoint be written, or read? Names the file, what is wrong with it, and what to do."""


def save_file(content: Any, path: Path) -> None:
    """Write a checkpoint; a file of that name stays as it is until the new one is complete and on the disk.

    Args:
        content: what ``torch.save`` takes.
        path: the file; its folder is made.

    Raises:
        StorageError: it cannot be written.
    """
    with written_beside(path) as partial:
        _save(content, partial)


def read_file(path: Path, weights_only: bool | None = None) -> Any:
    """Read a checkpoint in one file; its tensors are mapped into memory, and copied when they are used.

    Args:
        path: of ``torch.save``, or safetensors.
        weights_only: False runs code that the file may hold; anything else refuses it.

    Raises:
        StorageError: there is none, it is damaged, or it holds code.
    """
    try:
        if path.suffix == ".safetensors":
            return load_safetensors(path)
        with path.open("rb") as file:
            # torch opens a file twice; by this name it is the same one, also where a run replaces it meanwhile.
            same = f"/dev/fd/{file.fileno()}"
            return torch.load(
                same if os.path.exists(same) else path, map_location="cpu", weights_only=weights_only is not False,
                mmap=zipfile.is_zipfile(file) or None,
            )  # fmt: skip
    except Exception as error:  # a damaged file may be taken for any sequence of the unpickler's instructions
        raise unreadable(path, error) from error


@contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """Write a file or folder under another name, and give it its own at the end; nothing is left behind otherwise.

    Raises:
        StorageError: what runs inside fails to write, the renaming fails, or ``path`` is a folder of something else.
    """
    partial = beside(path)
    try:
        make_folder(path.parent)
        remove_leftovers(path)
        check_replaceable(path)
        yield partial
        replace_durably(partial, path)
    except (OSError, RuntimeError) as error:
        raise not_written(path, error) from error
    finally:
        remove(partial)


def local_path(path: Any) -> Path | None:
    """The path, if it is one of a file system of this machine."""
    files, name = url_to_fs(str(path))
    return Path(name) if isinstance(files, LocalFileSystem) else None


def beside(path: Path) -> Path:
    """A name beside it for what is not complete."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{_PARTIAL}")


def remove_leftovers(path: Path) -> None:
    """Remove what earlier attempts to write ``path`` left, which ended with their process."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}{re.escape(_PARTIAL)}")
    for name in os.listdir(path.parent) if path.parent.is_dir() else []:
        if pattern.fullmatch(name):
            remove(path.with_name(name))


def foreign_files(folder: Path) -> list[str]:
    """Return the names in a folder that do not belong to a sharded checkpoint; none if there is no such folder."""
    names = os.listdir(folder) if is_folder(folder) else []
    return sorted(n for n in names if n != INDEX and not PART.fullmatch(n))


def check_replaceable(path: Path) -> None:
    """Refuse to write a checkpoint over a folder of something else.

    Raises:
        StorageError: there is one.
    """
    if foreign := foreign_files(path):
        names = f"{', '.join(foreign[:3])}{', ...' if foreign[3:] else ''}"
        raise StorageError(f"it is a folder that holds something else ({names}); name another path")


def _save(content: Any, path: Path) -> None:
    with path.open("wb") as file:  # torch's own stream does not say that the disk is full
        torch.save(content, file)


def not_written(path: Path, error: BaseException) -> StorageError:
    """The error to raise where a checkpoint could not be written."""
    reason = next(iter(str(error).strip().splitlines()), repr(error))
    kind = "" if isinstance(error, StorageError) else f"{type(error).__name__}: "
    return StorageError(f"a checkpoint could not be written: {kind}{reason} ({path})")


def unreadable(path: Path, error: BaseException) -> StorageError:
    """The error to raise where a checkpoint could not be read."""
    if isinstance(error, FileNotFoundError):
        return StorageError(f"there is no checkpoint {path}")
    if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # such as of places that a file has not
        return StorageError(f"{path} cannot be read ({error.strerror})")
    if isinstance(error, pickle.UnpicklingError):  # torch would advise to run the code
        return StorageError(
            f"{path} cannot be read without running code that it may hold, or is damaged. If it is yours and you trust"
            " it, pass weights_only=False to what loads it in Python"
        )
    reason = next(iter(str(error).strip().splitlines()), repr(error))
    return StorageError(f"{path} is damaged or no checkpoint: {type(error).__name__}: {reason}")


FORMAT = "lightning_asyncpp.sharded.2"


class Target(NamedTuple):
    """Target of a save, the same on all stages.

    Attributes:
        path: the checkpoint.
        folder: folder of the new files: the checkpoint if it exists, or else a temporary one that takes its place.
        save: name of the save, a part of its files' names.
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
    """Return whether a path is a folder with an index; False if the folder may not be read."""
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
    files = index.get("files") if isinstance(index, dict) and index.get("format") == FORMAT else None
    if not isinstance(files, dict) or not files or not all(map(PART.fullmatch, files)):
        raise StorageError(f"{folder / INDEX} is not the index of a sharded checkpoint that this release reads")
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
        _save(dict(part), file)
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
    index = {"format": FORMAT, "files": dict(files)}
    try:
        if missing := [name for name in files if not (folder / name).is_file()]:
            raise StorageError(f"{', '.join(missing)} is not there: all machines must see the same folder")
        sync(folder)  # before the index: it must not outlive the loss of power alone
        written = folder / f"{target.save}-{INDEX}"
        written.write_text(json.dumps(index, indent=2))
        replace_durably(written, folder / INDEX)
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
