"""A checkpoint that is open: what is read of it belongs to one save, while a run may replace it.

A file that is open stays what it is when another one gets its name, or when it is removed. So whatever is read more
than once, to be compared with a checksum and to be loaded, is read from files that were opened once.
"""

from __future__ import annotations

import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_asyncpp.storage.durable import checksum_of, name_of_opened, size_of
from lightning_asyncpp.storage.names import INDEX, StorageError
from lightning_asyncpp.storage.nested import STORED, entry_dtype, entry_shape, put_together, shard_of
from lightning_asyncpp.storage.sharded import Shard, files_of, is_sharded, no_index, parsed_index
from lightning_asyncpp.storage.whole import (
    damage_of,
    missing,
    no_regular_file,
    read_opened,
    unreadable,
    unreadable_file,
)

_ATTEMPTS = 20
_END_BYTES = 2**20
Done = Callable[[int], object]


class Opened:
    """One save of a checkpoint, open until :meth:`close`; tensors that were loaded stay when it is closed.

    Attributes:
        path: its name, which may be another save's by now.
        identity: tells it from other saves; of a copy, and on another machine, it is the same.
        index: what the index of a folder says.
    """

    path: Path
    identity: str
    index: Mapping[str, Any] | None = None

    def damages(self, done: Done = lambda num_bytes: None, part: int = 0, parts: int = 1) -> list[str]:
        """Compare the files with their checksums, or every ``parts``-th of them.

        Args:
            done: called with the number of bytes of every file that was read.
            part: the first of them; a single file is that of part 0.
            parts: among how many readers the files are divided.

        Returns:
            What is wrong with them, a text for each.

        Raises:
            StorageError: a single file cannot be taken apart.
        """
        raise NotImplementedError

    def load(self, weights_only: bool | None = None) -> Any:
        """Read all of it; tensors are mapped into memory, so that what is not used is not read.

        Args:
            weights_only: False lets a single file run code; a folder has none.

        Raises:
            StorageError: it is damaged, or holds code.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Close its files."""
        raise NotImplementedError


class ReplacedError(StorageError):
    """Another save has the name of one that was about to be opened, and that is gone."""


@contextmanager
def opened(path: Path) -> Iterator[Opened]:
    """Open a checkpoint for as long as the context lasts.

    Raises:
        StorageError: as :func:`open_checkpoint` says.
    """
    checkpoint = open_checkpoint(path)
    try:
        yield checkpoint
    finally:
        checkpoint.close()


def open_checkpoint(path: Path) -> Opened:
    """Open a checkpoint; one that is replaced meanwhile is opened anew.

    Args:
        path: a file, or a folder with an index.

    Raises:
        StorageError: there is none, its index is damaged, or it is replaced again and again.
    """
    for _ in range(_ATTEMPTS):
        try:
            return _OpenedFolder(path) if path.is_dir() else _OpenedFile(path)
        except ReplacedError:
            continue
        except StorageError:
            raise
        except (OSError, ValueError) as error:
            raise unreadable(path, error) from error
    raise StorageError(
        f"the checkpoint {path} is being replaced by a run, faster than it can be opened: copy it, or name one that"
        " stays"
    )


class _OpenedFile(Opened):
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = _opened_file(path)
        except FileNotFoundError:
            raise missing(path) from None
        size = size_of(self._file)
        self._file.seek(max(size - _END_BYTES, 0))
        # There is its checksum, or the archive's list of what it holds, with one for each.
        self.identity = f"{size} bytes that end in {zlib.crc32(self._file.read()):08x}"

    def damages(self, done: Done = lambda num_bytes: None, part: int = 0, parts: int = 1) -> list[str]:
        if part:
            return []
        try:
            damage = damage_of(self._file)
        except Exception as error:  # whatever a damaged archive is taken for
            raise unreadable_file(self._file, self.path, error) from error
        done(size_of(self._file))
        return [f"{self.path} is damaged: {damage}"] if damage else []

    def load(self, weights_only: bool | None = None) -> Any:
        return read_opened(self._file, self.path, weights_only)

    def close(self) -> None:
        self._file.close()


class _OpenedFolder(Opened):
    def __init__(self, folder: Path) -> None:
        self.path = folder
        text = _index_text(folder)
        self.index = parsed_index(folder, text)
        self._run, self._shards = files_of(self.index, folder)
        self.identity = f"an index of CRC-32 {zlib.crc32(text):08x}"
        self._files: dict[str, BinaryIO] = {}
        with ExitStack() as closing:
            for shard in self._all:
                if (folder / shard.file).is_file():
                    with suppress(FileNotFoundError):
                        self._files[shard.file] = closing.enter_context(_opened_file(folder / shard.file))
            if len(self._files) < len({shard.file for shard in self._all}) and _index_text(folder) != text:
                raise ReplacedError(f"{folder} has another index by now")  # whose save removed these files
            self._closing = closing.pop_all()

    @property
    def _all(self) -> tuple[Shard, ...]:
        return (self._run, *self._shards)

    def damages(self, done: Done = lambda num_bytes: None, part: int = 0, parts: int = 1) -> list[str]:
        return [problem for shard in self._all[part::parts] for problem in self._damages_of(shard, done)]

    def load(self, weights_only: bool | None = None) -> Any:
        run, *shards = [self._file_of(shard) for shard in self._all]
        skeleton = read_opened(run, self.path / self._run.file, weights_only=True)
        files = {shard.name: self._tensors(shard, file) for shard, file in zip(self._shards, shards)}
        return put_together(skeleton, _Tensors(self.path, files))

    def close(self) -> None:
        self._closing.close()

    def _damages_of(self, shard: Shard, done: Done) -> list[str]:
        try:
            file = self._file_of(shard)
        except StorageError as error:
            return [str(error)]
        path = self.path / shard.file
        try:
            found = checksum_of(file)
        except OSError as error:
            return [str(unreadable(path, error))]
        done(shard.num_bytes)
        if found == shard.crc32:
            return []
        return [f"{path} is damaged: its CRC-32 is {found}, and was {shard.crc32} when it was written"]

    def _file_of(self, shard: Shard) -> BinaryIO:
        path = self.path / shard.file
        if (file := self._files.get(shard.file)) is None:
            raise StorageError(f"{path} is missing, though {INDEX} names it")
        if (size := size_of(file)) != shard.num_bytes:
            raise StorageError(f"{path} has {size} bytes, and had {shard.num_bytes} when it was written")
        return file

    def _tensors(self, shard: Shard, file: BinaryIO) -> Any:
        path = self.path / shard.file
        try:  # its name is of this save alone, where no other one leads to the open file
            return safe_open(name_of_opened(file) or path, framework="pt")
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


def _opened_file(path: Path) -> BinaryIO:
    try:
        # A pipe would wait for somebody who writes, a device never end, and some do something when they are opened.
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise StorageError(no_regular_file(path))
        return path.open("rb")
    except StorageError:
        raise
    except NotADirectoryError as error:
        raise FileNotFoundError(error.errno, error.strerror, error.filename) from error
    except FileNotFoundError:
        raise
    except IsADirectoryError as error:
        raise ReplacedError(f"{path} has become a folder") from error
    except OSError as error:
        raise unreadable(path, error) from error


def _index_text(folder: Path) -> bytes:
    try:
        with _opened_file(folder / INDEX) as file:
            return file.read()
    except (FileNotFoundError, ReplacedError) as error:
        if is_sharded(folder) or not folder.is_dir():
            raise ReplacedError(f"{folder} had no index for a moment") from error
        raise StorageError(no_index(folder)) from error
