"""The end of a process, however it was started, and whether it ends because nobody caught an error."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from multiprocessing import util


class AtExit:
    """Calls a function once when this process ends, not when one ends that was forked from it.

    Args:
        action: the function.
    """

    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action
        self._process = os.getpid()
        atexit.register(self._run)
        # Before Python 3.13 processes that multiprocessing forked end without atexit.
        self._finalizer = util.Finalize(None, self._run, exitpriority=0)

    def cancel(self) -> None:
        """Do not call it."""
        self._action = None
        atexit.unregister(self._run)
        self._finalizer.cancel()

    def _run(self) -> None:
        action, self._action = self._action, None
        if action is not None and os.getpid() == self._process:
            action()


def uncaught() -> BaseException | None:
    """The error that ends this process; to be called when it ends."""
    error = sys.exc_info()[1] or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if isinstance(error, SystemExit):
        return (error.__context__ or error) if error.code else None
    return error
