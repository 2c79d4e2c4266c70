"""A folder of checkpoints belongs to one run at a time: another one would replace or remove what it writes."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lightning_asyncpp.storage.durable import make_folder
from lightning_asyncpp.storage.lock import LEASE, FolderLock
from lightning_asyncpp.storage.names import StorageError

PATIENCE_SECONDS = 15.0
"""How long a run waits for one that is about to end: workers of its loader outlive it for some seconds."""
SAVE_SECONDS = 600.0
"""How long it waits for a single save."""
_RUN = "run"
_locks: dict[Path, FolderLock] = {}  # of this process, which does not compete with itself


class Leases:
    """The folders that a run writes into: taken until it ends, or where nobody says when that is, for single saves."""

    def __init__(self) -> None:
        self._about: dict[str, Any] | None = None
        self._folders: set[Path] = set()

    def begin(self, about: Mapping[str, Any]) -> None:
        """The run begins, and says when it ends.

        Args:
            about: what others are told of it.
        """
        self._about = dict(about)

    def hold(self, folder: Path) -> Callable[[], None]:
        """Take a folder, until the run ends, or what is returned is called; it is made if need be.

        Raises:
            StorageError: the run of another process has it, or it cannot be made.
        """
        folder = folder.resolve()
        if folder in _locks:
            return _nothing
        try:
            make_folder(folder)
            lock = self._lock(folder)
        except BlockingIOError as error:
            raise StorageError(
                f"{folder} is where another run writes its checkpoints ({_in_words(folder)}), and each would replace or"
                " remove the other's: give this run another folder, for instance another dirpath of ModelCheckpoint, or"
                " end that one first"
            ) from error
        except OSError as error:
            raise StorageError(f"no checkpoint can be written into {folder}: {error}") from error
        _locks[folder] = lock
        if self._about is None:
            return lambda: _release(folder)
        self._folders.add(folder)
        return _nothing

    def _lock(self, folder: Path) -> FolderLock:
        """Wait for a single save to its end, for a run not."""
        deadline = time.monotonic() + SAVE_SECONDS
        while True:
            try:
                return FolderLock(folder, self._said, PATIENCE_SECONDS)
            except BlockingIOError:
                if _RUN in _who(folder) or time.monotonic() > deadline:
                    raise

    def end(self) -> None:
        """The run ends; may be called twice."""
        for folder in self._folders:
            _release(folder)
        self._folders.clear()
        self._about = None

    def _said(self) -> bytes:
        about = {} if self._about is None else {_RUN: self._about.get(_RUN, ""), **self._about}
        since = datetime.now(timezone.utc).isoformat(timespec="seconds")
        return json.dumps({**about, "host": socket.gethostname(), "process": os.getpid(), "since": since}).encode()


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
