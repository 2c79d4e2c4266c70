"""First cause of a failure: one key of torch's store, which all ranks read and only the first failing rank writes.

A thread of each rank asks for the key once a second, and nobody else touches the store: where it does not answer, as
behind a cut network, no script waits for it.
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
"""A thousand ranks that ask so often take a fiftieth of a core where the store is served."""
MAX_LINE = 1000
"""Characters of an error in one line that others are told."""
MAX_TRACE = 2**14
"""Characters of its traceback that others are told: the last ones."""


@dataclass(frozen=True)
class Cause:
    """The first thing that went wrong.

    Attributes:
        line: it in one line, with the rank.
        trace: the traceback of the error; empty for a rank that is gone.
    """

    line: str
    trace: str = ""

    @classmethod
    def of(cls, error: BaseException, place: str) -> Cause:
        """An error that a rank met, whether it was raised or not.

        Args:
            error: a lost peer is that one's failure; any other error is this rank's own.
            place: this rank, in words.
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
        """It as a whole."""
        return f"{self.line}\n\n{textwrap.indent(self.trace, '    ')}" if self.trace else self.line


class FirstCause:
    """The key, as one rank sees it.

    Args:
        key: its name, the same on all ranks and of this run alone.
        server: the rank that serves the store, in words.
        on_cause: called once, in the thread, when there is a cause.

    Attributes:
        cause: what went wrong first, as far as this rank knows.
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
        """Write a cause, unless there is one already; returns the first, as far as it is known within ``seconds``."""
        self._own = cause
        self._wake.set()
        self._known.wait(seconds)
        if self._is_lost and not cause.trace:
            # Alone, a store without an answer may have ended well with its server; beside a lost neighbour it died.
            return Cause(f"{self._server} is gone: torch's store, which it or torchrun serves, does not answer")
        return self.cause or cause

    def stop(self) -> None:
        """Look no longer."""
        self._is_stopped = True
        self._wake.set()

    def _run(self) -> None:
        try:
            while not self._is_stopped and (found := self._look()) is None:
                self._wake.wait(POLL_SECONDS)
        except RuntimeError:  # of torch.distributed
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
