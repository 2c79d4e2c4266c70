"""First cause of a failure: a key in torch's store that all ranks read and only the first failing rank writes.

On each rank only one thread uses the store, once a second, so scripts never wait for a store that does not answer.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing import util
from typing import Any

import torch.distributed as dist

from lightning_asyncpp.core import background
from lightning_asyncpp.dependencies import required
from lightning_asyncpp.errors import PeerLostError

POLL_SECONDS = 1.0
"""Seconds between two reads. The reads of a thousand ranks take 2 % of a core of the machine that serves the store."""
MAX_LINE = 1000
"""Maximum number of characters of a cause's line, which other ranks receive."""
MAX_TRACE = 2**14
"""Maximum number of characters of a cause's traceback; a longer one loses its beginning."""


@dataclass(frozen=True)
class Cause:
    """First cause of a failure.

    Attributes:
        line: the failure in one line, with the rank.
        trace: traceback of the error; empty for a lost rank.
    """

    line: str
    trace: str = ""

    @classmethod
    def of(cls, error: BaseException, place: str) -> Cause:
        """Return the cause of an error.

        Args:
            error: error of this rank; for a PeerLostError, the cause is the loss of the other rank.
            place: name of this rank.
        """
        if isinstance(error, PeerLostError):
            return cls(_shortened(str(error)))
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
        if len(trace) > MAX_TRACE:
            trace = f"...\n{trace[-MAX_TRACE:]}"
        what = _shortened("".join(traceback.format_exception_only(type(error), error)))
        return cls(f"{place} failed first: {what}", trace)

    @property
    def text(self) -> str:
        """The line and the traceback."""
        return f"{self.line}\n\n{textwrap.indent(self.trace, '    ')}" if self.trace else self.line


class FirstCause:
    """Access of one rank to the first cause.

    Args:
        key: name of the key, the same on all ranks and unique to the run.
        server: name of the rank that serves the store.
        on_cause: function called once, in the thread that reads the store, when a cause is found.

    Attributes:
        cause: first cause; None until this rank knows it.
    """

    def __init__(self, key: str, server: str, on_cause: Callable[[Cause], None]) -> None:
        purpose = "tell all ranks of a failure"
        self._store: Any = required(dist.distributed_c10d, "_get_default_store", purpose)()
        self.cause: Cause | None = None
        self._key, self._server, self._on_cause = key, server, on_cause
        self._own: Cause | None = None
        self._is_lost = self._is_stopped = False
        self._wake, self._known = threading.Event(), threading.Event()
        background.run(self._run, "first-cause")

    def wait(self, seconds: float) -> Cause | None:
        """Wait until the first cause is known, and return it; None after the timeout."""
        self._known.wait(seconds)
        return self.cause

    def report(self, cause: Cause, seconds: float) -> Cause:
        """Write a cause, unless the store has one already, and return the first cause.

        If the store does not answer within ``seconds``, return ``cause``. If the connection to it broke and ``cause``
        is a lost rank, return the loss of the store's server instead.
        """
        self._own = cause
        self._wake.set()
        self._known.wait(seconds)
        if self._is_lost and not cause.trace:
            # The broken connection alone proves nothing, since a store may end as planned. But this rank has also lost
            # a neighbour (its cause has no traceback), so the server has failed.
            return Cause(f"{self._server} is gone: torch's store, which it or torchrun serves, does not answer")
        return self.cause or cause

    def stop(self) -> None:
        """Stop reading the store."""
        self._is_stopped = True
        self._wake.set()

    def _run(self) -> None:
        try:
            while not self._is_stopped and (found := self._look()) is None:
                self._wake.wait(POLL_SECONDS)
        except RuntimeError:  # the store does not answer
            self._is_lost = True
            self._known.set()
            return
        if not self._is_stopped and found is not None:
            self.cause = found
            self._known.set()
            self._on_cause(found)

    def _look(self) -> Cause | None:
        if self._own is not None:
            text = json.dumps(asdict(self._own), ensure_ascii=True)
            return Cause(**json.loads(self._store.compare_set(self._key, "", text)))
        return Cause(**json.loads(self._store.get(self._key))) if self._store.check([self._key]) else None


def _shortened(text: str) -> str:
    return textwrap.shorten(text, MAX_LINE, placeholder=" ...")


class AtExit:
    """Function called once when this process ends, but not at the end of a process forked from it.

    Args:
        action: the function.
    """

    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action
        self._process = os.getpid()
        atexit.register(self._run)
        # Before Python 3.13, processes forked by multiprocessing do not run atexit.
        self._finalizer = util.Finalize(None, self._run, exitpriority=0)

    def cancel(self) -> None:
        """Cancel the call of the function."""
        self._action = None
        atexit.unregister(self._run)
        self._finalizer.cancel()

    def _run(self) -> None:
        action, self._action = self._action, None
        if action is not None and os.getpid() == self._process:
            action()


def uncaught() -> BaseException | None:
    """Return the exception that ends this process. Call this function at exit."""
    error = sys.exc_info()[1] or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if isinstance(error, SystemExit):
        return (error.__context__ or error) if error.code else None
    return error
