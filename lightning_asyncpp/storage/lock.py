"""A lock on a folder, which the system lifts when the process that has it ends, however it ends.

The file ``.lease`` in the folder is locked (``flock``), and says who has it. Without a lock the file means nothing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

LEASE = ".lease"
"""Name of the file."""
# The last one: of files that are only read, as NFS has it.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)
_EVERY_SECONDS = 0.2
_of_this_process: dict[Path, FolderLock] = {}


class FolderLock:
    """The lock of a folder, of this process.

    Args:
        folder: it is there.
        about: who this is, for others.
        patience: seconds to wait for another process that has it.

    Raises:
        BlockingIOError: another process still has it.
        OSError: the file cannot be made.
    """

    def __init__(self, folder: Path, about: Callable[[], bytes], patience: float) -> None:
        self._folder = folder.resolve()
        self._file = self._folder / LEASE
        self._descriptor: int | None = None
        deadline = time.monotonic() + patience
        while not self._try(about):
            if time.monotonic() >= deadline:
                raise BlockingIOError(errno.EAGAIN, "another process has the lock", str(self._file))
            time.sleep(_EVERY_SECONDS)
        _of_this_process[self._folder] = self

    def release(self) -> None:
        """Give it up, and remove the file."""
        if self._descriptor is not None:
            with suppress(OSError):  # the folder may be gone
                self._file.unlink()
            os.close(self._descriptor)
            self._descriptor = None
        _of_this_process.pop(self._folder, None)

    def leave_to_parent(self) -> None:
        """This process was forked: the lock is its parent's, and is lifted when that one ends."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _try(self, about: Callable[[], bytes]) -> bool:
        try:
            descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except PermissionError:  # what another user's run left there; it is locked as well if it is only read
            if not self._file.is_file() or not os.access(self._folder, os.W_OK):
                raise
            descriptor = os.open(self._file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(descriptor).st_nlink:  # who had it removed it meanwhile
                os.close(descriptor)
                return False
        except OSError as error:
            os.close(descriptor)
            if error.errno in _NO_LOCKS:  # nobody can have one in this file system
                return True
            if isinstance(error, BlockingIOError):
                return False
            raise
        with suppress(OSError):  # another user's, or a full disk, of which whoever writes next will tell
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, about(), 0)
        self._descriptor = descriptor
        return True


def is_locked_by_another(folder: Path) -> bool:
    """Whether another process has the lock of a folder."""
    folder = folder.resolve()
    if folder in _of_this_process:
        return False
    try:
        descriptor = os.open(folder / LEASE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _after_fork() -> None:
    for lock in _of_this_process.values():
        lock.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)
