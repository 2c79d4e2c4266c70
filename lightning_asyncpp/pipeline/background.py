"""Threads that may be inside torch, and none of which is left there when the interpreter ends.

A thread that comes back from C++ to an interpreter that is ending is ended on the spot, through frames that do not
allow it, and the whole process is aborted ("terminate called without an active exception"), however well its script
ended. So whoever calls torch from a thread of its own does it here.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress

_PATIENCE_SECONDS = 5.0
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


# Registered first of all of this package's, and so called last: after those that end what threads wait for.
atexit.register(finish)
