"""A folder of checkpoints belongs to one run at a time: another one would replace or remove what it writes."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from lightning_asyncpp.storage.durable import make_folder
from lightning_asyncpp.storage.lock import LEASE, FolderLock
from lightning_asyncpp.storage.names import StorageError, local_path

PATIENCE_SECONDS = 15.0
"""How long a run waits for one that is about to end: workers of its loader outlive it for some seconds."""
SAVE_SECONDS = 600.0
"""How long it waits for a single save."""
_RUN = "run"
_locks: dict[Path, FolderLock] = {}  # of this process, which does not compete with itself


class Leases:
    """The folders that a run writes into. Its own are taken until it ends, and others for single saves."""

    def __init__(self) -> None:
        self._about: dict[str, Any] | None = None
        self._own: set[Path] = set()
        self._held: set[Path] = set()

    def begin(self, about: Mapping[str, Any], folders: Iterable[Path]) -> None:
        """The run begins, and takes those of its folders that are there; the others when it first writes there.

        Args:
            about: what others are told of it.
            folders: in which it replaces and removes checkpoints by itself.

        Raises:
            StorageError: the run of another process has one of them.
        """
        self._about, self._own = dict(about), {folder.resolve() for folder in folders}
        for folder in self._own:
            if folder.is_dir():
                self.hold(folder)

    def hold(self, folder: Path) -> Callable[[], None]:
        """Take a folder, one of the run's until that ends, else until what is returned is called; it is made.

        A single save goes on where another run has the folder: who names a file there means it.

        Raises:
            StorageError: the run of another process has one of this run's, or it cannot be made.
        """
        folder = folder.resolve()
        is_own = folder in self._own
        if folder in _locks:
            return _nothing
        try:
            make_folder(folder)
            lock = self._lock(folder, is_own)
        except BlockingIOError as error:
            if not is_own:
                return _nothing
            raise StorageError(
                f"{folder} is where another run writes its checkpoints ({_in_words(folder)}), and each would replace or"
                " remove the other's: give this run another folder, for instance another dirpath of ModelCheckpoint, or"
                " end that one first"
            ) from error
        except OSError as error:
            raise StorageError(f"no checkpoint can be written into {folder}: {error}") from error
        _locks[folder] = lock
        if not is_own:
            return lambda: _release(folder)
        self._held.add(folder)
        return _nothing

    @contextmanager
    def writing(self, path: Any) -> Iterator[None]:
        """Hold the folder of a file while it is written; of a file in no file system of this machine there is none.

        Raises:
            StorageError: as for :meth:`hold`.
        """
        local = local_path(path)
        release = _nothing if local is None else self.hold(local.parent)
        try:
            yield
        finally:
            release()

    def _lock(self, folder: Path, is_own: bool) -> FolderLock:
        """Wait for a single save to its end; for a run that may be about to end some seconds, if this is one, too."""
        deadline, about = time.monotonic() + SAVE_SECONDS, partial(_said, self._about if is_own else None)
        while True:
            is_of_run = not is_own and _RUN in _who(folder)
            try:
                return FolderLock(folder, about, 0.0 if is_of_run else PATIENCE_SECONDS)
            except BlockingIOError:
                if _RUN in _who(folder) or time.monotonic() > deadline:
                    raise

    def end(self) -> None:
        """The run ends; may be called twice."""
        for folder in self._held:
            _release(folder)
        self._held.clear()
        self._own.clear()
        self._about = None


def _said(about: Mapping[str, Any] | None) -> bytes:
    of_run = {} if about is None else {_RUN: about.get(_RUN, ""), **about}
    since = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return json.dumps({**of_run, "host": socket.gethostname(), "process": os.getpid(), "since": since}).encode()


def _release(folder: Path) -> None:
    _locks.pop(folder).release()


def _who(folder: Path) -> dict[str, Any]:
    """What another process says of itself; nothing if it does not."""
    try:
        said = json.loads((folder / LEASE).read_bytes())
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _in_words(folder: Path) -> str:
    return ", ".join(f"{name} {value}" for name, value in _who(folder).items()) or "it does not say who it is"


def _nothing() -> None:
    """The folder is held longer."""
