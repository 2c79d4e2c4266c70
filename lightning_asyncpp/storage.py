"""Checkpoints on disk: a file of ``torch.save``, or a folder of such files, one per stage.

By default, reading a checkpoint runs no code that its files may hold.

A file or folder exists either complete or not at all, even after a loss of power. A rename is atomic, but a file system
may write the rename before the content, so the content is synchronised first. Readers of a folder merge its parts by
key. A new save adds files under new names, and replaces ``index.json`` last. Until then the old checkpoint stays valid.
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
    """Rename a file or folder once its content is on the disk.

    Args:
        written: complete file or folder.
        name: final name, in the same file system. A file or folder of this name is replaced, unless both are folders
            and the old folder has content. Replacing a file by a folder, or a folder by a file, is not atomic.

    Raises:
        OSError: the content cannot be written, or both are folders and ``name`` has content (nothing is renamed then);
            or the parent folder cannot be written, before or after the rename.
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
    """Create a folder and its missing parents, and wait until they are on the disk.

    Raises:
        OSError: a folder cannot be created.
    """
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync(path.parent)


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder and not a link to one."""
    return path.is_dir() and not path.is_symlink()


def remove(path: Path) -> None:
    """Remove a file or folder; do nothing if it does not exist or cannot be removed."""
    with suppress(OSError):
        shutil.rmtree(path) if is_folder(path) else path.unlink()


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


INDEX = "index.json"
"""File that lists the files of a sharded checkpoint."""
PART = re.compile(rf"[0-9a-f]{{12}}-(stage-\d{{4,}}\.pt|{re.escape(INDEX)})")
"""Pattern of file names in a sharded checkpoint: a stage's part, or an index before it is renamed."""
_PARTIAL = ".partial"  # suffix of incomplete files and folders


class StorageError(OSError):
    """Checkpoint that cannot be written or read."""


def save_file(content: Any, path: Path) -> None:
    """Write a checkpoint; an existing file stays until the new file is complete and on the disk.

    Args:
        content: object for ``torch.save``.
        path: file of the checkpoint; its folder is created.

    Raises:
        StorageError: the file cannot be written.
    """
    with atomic_write(path) as partial:
        _save(content, partial)


def read_file(path: Path, weights_only: bool | None = None) -> Any:
    """Read a checkpoint from one file; its tensors are mapped into memory and read when they are used.

    Args:
        path: file of ``torch.save`` or of safetensors.
        weights_only: if False, run code that the file may hold; else refuse files with code.

    Raises:
        StorageError: the file is missing or damaged, or holds code.
    """
    try:
        if path.suffix == ".safetensors":
            return load_safetensors(path)
        with path.open("rb") as file:
            # torch opens a file twice. With this name it opens the same file, even if a run writes a new one meanwhile.
            same = f"/dev/fd/{file.fileno()}"
            return torch.load(
                same if os.path.exists(same) else path, map_location="cpu", weights_only=weights_only is not False,
                mmap=zipfile.is_zipfile(file) or None,
            )  # fmt: skip
    except Exception as error:  # a damaged file can make the unpickler raise anything
        raise unreadable(path, error) from error


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, and rename it to ``path`` at the end; on an error, remove it.

    Raises:
        StorageError: writing, renaming or the wait for the disk after the rename fails, or ``path`` is a folder with
            files that belong to no checkpoint.
    """
    partial = temporary_name(path)
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
    """Return the path if it is on a local file system, else None."""
    files, name = url_to_fs(str(path))
    return Path(name) if isinstance(files, LocalFileSystem) else None


def temporary_name(path: Path) -> Path:
    """Return a temporary name in the same folder."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{_PARTIAL}")


def remove_leftovers(path: Path) -> None:
    """Remove temporary files and folders of ``path``, which earlier processes left when they failed to write it."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}{re.escape(_PARTIAL)}")
    for name in os.listdir(path.parent) if path.parent.is_dir() else []:
        if pattern.fullmatch(name):
            remove(path.with_name(name))


def foreign_files(folder: Path) -> list[str]:
    """Return the names in a folder that do not belong to a sharded checkpoint; an empty list without a folder."""
    names = os.listdir(folder) if is_folder(folder) else []
    return sorted(n for n in names if n != INDEX and not PART.fullmatch(n))


def check_replaceable(path: Path) -> None:
    """Check that writing a checkpoint to ``path`` would delete nothing else.

    Raises:
        StorageError: ``path`` is a folder with files that belong to no checkpoint.
    """
    if foreign := foreign_files(path):
        names = f"{', '.join(foreign[:3])}{', ...' if foreign[3:] else ''}"
        raise StorageError(f"the path is a folder with other files ({names}); give another path")


def _save(content: Any, path: Path) -> None:
    with path.open("wb") as file:  # torch's own stream does not report a full disk
        torch.save(content, file)


def not_written(path: Path, error: BaseException) -> StorageError:
    """Return the error for a checkpoint that could not be written."""
    reason = next(iter(str(error).strip().splitlines()), repr(error))
    kind = "" if isinstance(error, StorageError) else f"{type(error).__name__}: "
    return StorageError(f"a checkpoint could not be written: {kind}{reason} ({path})")


def unreadable(path: Path, error: BaseException) -> StorageError:
    """Return the error for a checkpoint that could not be read."""
    if isinstance(error, FileNotFoundError):
        return StorageError(f"there is no checkpoint {path}")
    if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # seeks in damaged files give EINVAL
        return StorageError(f"{path} cannot be read ({error.strerror})")
    if isinstance(error, pickle.UnpicklingError):  # torch's message advises to run the code
        return StorageError(
            f"{path} cannot be read without running code that it may hold, or is damaged. If you trust its source, load"
            " it in Python with weights_only=False"
        )
    reason = next(iter(str(error).strip().splitlines()), repr(error))
    return StorageError(f"{path} is damaged or no checkpoint: {type(error).__name__}: {reason}")


FORMAT = "lightning_asyncpp.sharded.2"


class Target(NamedTuple):
    """Target of a save, the same on all stages.

    Attributes:
        path: path of the checkpoint.
        folder: folder of the new files: the checkpoint's folder if it exists, else a temporary one, which is renamed at
            the end.
        save: random name of the save, the prefix of its files' names.
    """

    path: str
    folder: str
    save: str


def load(path: Path, weights_only: bool | None = None) -> Any:
    """Read a whole checkpoint; tensors are mapped into memory, so unused ones are not read.

    Args:
        path: file, or folder with an index.
        weights_only: if False, run code that a single file may hold; sharded checkpoints never run code.

    Raises:
        StorageError: ``path`` is no checkpoint, is damaged or holds code; or a file that the index lists is missing or
            has another size.
    """
    if not os.path.isdir(path):
        return read_file(path, weights_only)
    files = read_index(path)
    for name, size in files.items():
        if not (path / name).is_file():
            raise StorageError(f"{path / name} is missing, though {INDEX} names it")
        if (found := (path / name).stat().st_size) != size:
            raise StorageError(f"{path / name} has {found} bytes, but had {size} when it was written")
    return merged([read_file(path / name) for name in files])


def merged(parts: Sequence[Any]) -> Any:
    """Merge nested dictionaries, and lists of the same length; where values conflict, the last part wins."""
    first, *others = parts
    for other in others:
        first = _merge(first, other)
    return first


def is_sharded(path: Path) -> bool:
    """Return whether a path is a folder with an index; False if the folder cannot be read."""
    with suppress(OSError):
        return (path / INDEX).is_file()
    return False


def read_index(folder: Path) -> dict[str, int]:
    """Return the files of a sharded checkpoint, in the order of stages: name -> size in bytes.

    Raises:
        StorageError: the index is missing or invalid.
    """
    if not is_sharded(folder):
        raise StorageError(f"{folder} is a folder without {INDEX}: no checkpoint, or one that was never completed")
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
    """Choose the target of a save, and remove temporary files of earlier saves; one rank calls this and broadcasts it.

    Raises:
        StorageError: ``path`` is a folder without a valid index and with files that belong to no checkpoint, or its
            parent folder cannot be created.
    """
    try:
        make_folder(path.parent)
        remove_leftovers(path)
        if not _named_files(path):
            check_replaceable(path)
    except OSError as error:
        raise not_written(path, error) from error
    folder = path if is_folder(path) else temporary_name(path)
    return Target(str(path), str(folder), secrets.token_hex(6))


def write_part(target: Target, stage: int, part: Mapping[str, Any]) -> tuple[str, int]:
    """Write a stage's part of a checkpoint to the disk.

    Args:
        target: result of :func:`new_target`.
        stage: index of the stage.
        part: the stage's entries.

    Returns:
        Name of the file in the folder, and its size in bytes.

    Raises:
        StorageError: the file cannot be written.
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
    """Replace the checkpoint by a save whose parts are all written.

    Args:
        target: result of :func:`new_target`.
        files: file name -> size in bytes, in the order of stages.

    Raises:
        StorageError: a part is missing, or the index cannot be written; the old or the new checkpoint is complete.
    """
    path, folder = Path(target.path), Path(target.folder)
    index = {"format": FORMAT, "files": dict(files)}
    try:
        if missing := [name for name in files if not (folder / name).is_file()]:
            raise StorageError(f"{', '.join(missing)} is not there: all machines must see the same folder")
        sync(folder)  # before the index: after a loss of power, the index must not list lost parts
        written = folder / f"{target.save}-{INDEX}"
        written.write_text(json.dumps(index, indent=2))
        replace_durably(written, folder / INDEX)
        if folder != path:
            replace_durably(folder, path)
    except OSError as error:
        raise not_written(path, error) from error
    _remove_others(path, kept={INDEX, *files})


def give_up(target: Target) -> None:
    """Remove the files of a save that was not committed."""
    folder = Path(target.folder)
    if target.folder != target.path:
        remove(folder)
        return
    named = _named_files(folder)  # commit() can still fail after it wrote the index
    for file in folder.glob(f"{target.save}-*"):
        if file.name not in named:
            remove(file)


def remove_sharded(path: Path) -> None:
    """Remove a checkpoint, or only the link if the path is a link.

    A folder's name vanishes at once, before its files are removed.
    """
    if is_folder(path):
        aside = temporary_name(path)
        with suppress(OSError):
            os.replace(path, aside)
            sync(path.parent)
        remove(aside)
    remove(path)


def _named_files(folder: Path) -> set[str]:
    """Return the names of a checkpoint's index and parts; an empty set if the index cannot be read."""
    try:
        return {INDEX, *read_index(folder)}
    except OSError:
        return set()


def _remove_others(folder: Path, kept: Collection[str]) -> None:
    """Remove all files of earlier saves from a folder; a file that cannot be removed does no harm."""
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
