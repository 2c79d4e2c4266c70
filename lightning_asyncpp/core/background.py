"""Threads that call torch, and a wait for them before the interpreter ends.

A thread that returns from C++ while the interpreter shuts down aborts the process ("terminate called without an active
exception"), even after a script that succeeded. So daemon threads that call torch are started here, and :func:`finish`
waits for them at exit. It also waits for gloo's worker threads, which enter the interpreter to free the tensors of a
finished collective.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

GLOO_WORKER = "pt_gloo_runloop"  # torch's name for gloo's worker threads
_PATIENCE_SECONDS = 5.0
_WORKER_SECONDS = 1.0
_MOMENT_SECONDS = 0.001
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_delayed: dict[threading.Timer, Callable[[], object]] = {}  # actions that have not begun


def run(action: Callable[[], object], name: str) -> None:
    """Run an action in a thread."""
    thread = threading.Thread(target=action, name=name, daemon=True)
    _threads.add(thread)
    thread.start()


def run_later(seconds: float, action: Callable[[], object]) -> None:
    """Run an action once: in a thread after ``seconds``, or when the interpreter ends, whichever comes first."""
    timer = threading.Timer(seconds, lambda: _run_delayed(timer))
    timer.daemon = True
    _threads.add(timer)
    _delayed[timer] = action
    timer.start()


def finish() -> None:
    """Run the delayed actions that have not begun; then wait for all threads, at most six seconds."""
    for timer in list(_delayed):
        timer.cancel()
        with suppress(Exception):
            _run_delayed(timer)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.monotonic()))
    wait_for_workers()


def _run_delayed(timer: threading.Timer) -> None:
    if (action := _delayed.pop(timer, None)) is not None:  # pop is atomic, so only one thread gets the action
        action()


def wait_for_workers() -> None:
    """Wait, at most a second, until all of gloo's worker threads sleep. By then they have freed their tensors."""
    deadline = time.monotonic() + _WORKER_SECONDS
    calm = 0
    # Check twice in a row, since a thread that waits for the GIL also looks asleep.
    while calm < 2 and time.monotonic() < deadline:
        time.sleep(_MOMENT_SECONDS)
        calm = 0 if _workers_run() else calm + 1


def _workers_run() -> bool:
    for thread in Path("/proc/self/task").glob("*"):  # exists on Linux only
        with suppress(OSError):  # the thread has ended
            name, _, rest = (thread / "stat").read_text().partition("(")[2].rpartition(")")
            if name == GLOO_WORKER and rest.split()[0] != "S":
                return True
    return False


# finish() is registered before this package's other exit handlers, so it runs after them. The other handlers end every
# wait for another rank.
atexit.register(finish)
