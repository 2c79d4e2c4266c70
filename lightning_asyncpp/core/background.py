"""Threads that may be inside torch, and none of which is left there when the interpreter ends.

A thread that comes back from C++ to an interpreter that is ending is ended on the spot, through frames that do not
allow it, and the whole process is aborted ("terminate called without an active exception"), however well its script
ended. So whoever calls torch from a thread of its own does it here.

The workers of gloo, threads of torch's own, enter the interpreter to let go of the tensors of a collective that is
done: after the last one they are waited for, too.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

GLOO_WORKER = "pt_gloo_runloop"  # so torch calls its threads
_PATIENCE_SECONDS = 5.0
_LET_GO_SECONDS = 1.0
_MOMENT_SECONDS = 0.001
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_later: weakref.WeakSet[_Later] = weakref.WeakSet()


class _Later:
    """Something to be done once: after a while, or when the interpreter ends, whichever comes first."""

    def __init__(self, seconds: float, action: Callable[[], object]) -> None:
        self._action = action
        self._once = threading.Lock()
        self._timer = threading.Timer(seconds, self.do)
        self._timer.daemon = True
        _threads.add(self._timer)
        self._timer.start()

    def do(self) -> None:
        """Do it, unless it is done or being done."""
        if self._once.acquire(blocking=False):
            self._action()

    def do_now(self) -> None:
        """Do it in this thread, or wait for it if it has begun."""
        self._timer.cancel()
        with suppress(Exception):
            self.do()


def run(action: Callable[[], object], name: str) -> None:
    """Do something in a thread."""
    thread = threading.Thread(target=action, name=name, daemon=True)
    _threads.add(thread)
    thread.start()


def run_later(seconds: float, action: Callable[[], object]) -> None:
    """Do something in a thread after ``seconds``, or when the interpreter ends."""
    _later.add(_Later(seconds, action))


def finish() -> None:
    """Do what is left to do, and wait for the threads: nobody waits for other ranks by then."""
    for later in list(_later):
        later.do_now()
    deadline = time.monotonic() + _PATIENCE_SECONDS
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.monotonic()))
    wait_for_workers()


def wait_for_workers() -> None:
    """Wait until all workers of gloo sleep, as they do when they have let go of everything, or for a second."""
    deadline = time.monotonic() + _LET_GO_SECONDS
    calm = 0
    while calm < 2 and time.monotonic() < deadline:  # twice: a thread that waits for the interpreter sleeps, too
        time.sleep(_MOMENT_SECONDS)
        calm = 0 if _workers_run() else calm + 1


def _workers_run() -> bool:
    for thread in Path("/proc/self/task").glob("*"):  # on Linux
        with suppress(OSError):  # it has ended
            name, _, rest = (thread / "stat").read_text().partition("(")[2].rpartition(")")
            if name == GLOO_WORKER and rest.split()[0] != "S":
                return True
    return False


# Registered first of all of this package's, and so called last: after those that end what threads wait for.
atexit.register(finish)
