"""A folder of checkpoints belongs to one run at a time: another one would replace or remove what it writes."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lightning_asyncpp.storage.durable import make_folder
from lightning_asyncpp.storage.lock import LEASE, FolderLock
from lightning_asyncpp.storage.names import StorageError

PATIENCE_SECONDS = 15.0
"""How long a run waits for one that is about to end: workers of its loader outlive it for some seconds."""
_locks: dict[Path, FolderLock] = {}  # of this process, which does not compete with itself


class Leases:
    """The folders that a run writes into, from :meth:`begin` to :meth:`end`."""

    def __init__(self) -> None:
        self._about: dict[str, Any] | None = None
        self._folders: set[Path] = set()

    def begin(self, about: Mapping[str, Any]) -> None:
        """The run begins.

        Args:
            about: what others are told of it.
        """
        self._about = dict(about)

    def hold(self, folder: Path) -> None:
        """Take a folder until the run ends, or none runs, only see that nobody else has it; it is made if need be.

        Raises:
            StorageError: the run of another process has it, or it cannot be made.
        """
        folder = folder.resolve()
        if folder in _locks:
            return
        try:
            make_folder(folder)
            lock = FolderLock(folder, self._said, PATIENCE_SECONDS)
        except BlockingIOError as error:
            raise StorageError(
                f"{folder} is where another run writes its checkpoints ({_who(folder)}), and each would replace or"
                " remove the other's: give this run another folder, for instance another dirpath of ModelCheckpoint, or"
                " end that one first"
            ) from error
        except OSError as error:
            raise StorageError(f"no checkpoint can be written into {folder}: {error}") from error
        if self._about is None:
            lock.release()
            return
        _locks[folder] = lock
        self._folders.add(folder)

    def end(self) -> None:
        """The run ends; may be called twice."""
        for folder in self._folders:
            _locks.pop(folder).release()
        self._folders.clear()
        self._about = None

    def _said(self) -> bytes:
        since = datetime.now(timezone.utc).isoformat(timespec="seconds")
        about = {**(self._about or {}), "host": socket.gethostname(), "process": os.getpid(), "since": since}
        return json.dumps(about).encode()


def _who(folder: Path) -> str:
    try:
        return ", ".join(f"{name} {value}" for name, value in json.loads((folder / LEASE).read_bytes()).items())
    except (OSError, ValueError, AttributeError):
        return "it does not say who it is"
