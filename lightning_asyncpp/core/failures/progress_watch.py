"""A limit on the time in which this process makes no progress, though it is alive and waits for nobody.

Signs of life prove a process, and a wait for another rank has a limit. Neither ends a run whose ranks all hang by
themselves, as in data loaders on a file system that does not answer.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_asyncpp.core.failures.standstill import Standstill, account_of, is_writing
from lightning_asyncpp.core.progress import PROGRESS

DEFAULT_SECONDS = 1800.0
"""As torch's process groups wait."""
_LATE_SECONDS = 5.0  # after which a wait that should have ended by itself counts like anything else
_LOOKS_PER_LIMIT = 50
_LONGEST_LOOK = 1.0
_WRITTEN_BYTES = 2**20  # so much more of a checkpoint is progress
_COMPUTES, _COMPUTING_COUNTS = 0.01, 0.1  # a thread that uses so much of a processor has ten times as long


class ProgressWatch:
    """Looks at the counter of progress now and then, while the script is where progress is due.

    It counts the time in which it ran itself: where the whole process was stopped, or the machine slept, nothing was
    due. Time in which the script computes, as a hook that evaluates something at length, counts a tenth: what hangs
    uses no processor.

    Args:
        limit: seconds without progress.
        on_standstill: called in the watch's thread: shortly before the limit, so that this comes before the waits of
            ranks that wait for this one; and of one that waits itself once more if that has not ended.
    """

    def __init__(self, limit: float, on_standstill: Callable[[Standstill], None]) -> None:
        self._limit, self._on_standstill = limit, on_standstill
        self._look = min(limit / _LOOKS_PER_LIMIT, _LONGEST_LOOK)
        self._due: set[str] = set()
        self._entered = 0
        self._ended: threading.Event | None = None
        self.thread = threading.main_thread().ident or 0

    def begin(self) -> None:
        """Watch, from the next :meth:`enter` on."""
        if self._ended is None:
            self._ended = threading.Event()
            threading.Thread(target=self._run, args=[self._ended], name="asyncpp-progress", daemon=True).start()

    def end(self) -> None:
        """Watch no longer."""
        self._due.clear()
        if self._ended is not None:
            self._ended.set()
            self._ended = None

    def enter(self, where: str) -> None:
        """Progress is due from here on, in this thread, until :meth:`leave` or :meth:`leave_all`."""
        self._due.add(where)
        self.thread = threading.get_ident()
        self._entered += 1

    def leave(self, where: str) -> None:
        """It is not, for what :meth:`enter` was told of."""
        self._due.discard(where)

    def leave_all(self) -> None:
        """None is."""
        self._due.clear()

    @contextmanager
    def within(self, where: str) -> Iterator[None]:
        """Progress is due meanwhile."""
        self.enter(where)
        try:
            yield
        finally:
            self._due.discard(where)

    def _run(self, ended: threading.Event) -> None:
        idle, written, before, said, used = 0.0, 0, time.monotonic(), 0, 0.0
        known: tuple[int, int] | None = None
        while not ended.wait(self._look):
            now = time.monotonic()
            passed, used_now = min(now - before, self._look + _LONGEST_LOOK), _processor_seconds(self.thread)
            idle += passed * (_COMPUTING_COUNTS if used_now - used > _COMPUTES * passed else 1.0)
            used = used_now
            before, present = now, (PROGRESS.made, self._entered)
            if present != known or not self._due:
                idle, known, said = 0.0, present, 0
            elif idle > self._limit / 2 and (so_far := _written(self.thread)) >= written + _WRITTEN_BYTES:
                idle, written = 0.0, so_far
            elif idle >= (self._limit - 2 * self._look, self._limit + _LATE_SECONDS, float("inf"))[said]:
                account = account_of(self.thread, self._limit)
                if account is None:  # a debugger
                    idle = 0.0
                    continue
                is_late, said = said == 1, 1 if account.waits and not said else 2
                self._on_standstill(account._replace(waits=account.waits and not is_late))


def _processor_seconds(thread: int) -> float:
    """Time for which a thread has had a processor; 0 where nobody counts it, or there is no such thread."""
    clock_of = getattr(time, "pthread_getcpuclockid", None)
    if clock_of is None or thread not in sys._current_frames():
        return 0.0
    try:
        return time.clock_gettime(clock_of(thread))
    except OSError:
        return 0.0


def _written(thread: int) -> int:
    """Bytes that this process has written, if its script is at a checkpoint; 0 where nobody counts them."""
    try:
        counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(counts["wchar"]) if is_writing(thread) else 0
    except (OSError, KeyError, ValueError):
        return 0
