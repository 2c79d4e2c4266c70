"""What went wrong first, on whichever rank, and how a process says it at its end.

What went wrong first, on whichever rank: what all ranks are told, and how they say it.

The end of a process, however it was started, and whether it ends because nobody caught an error.

What a process says when it ends, below all that its children said: the failure that ended the run, if one did.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import textwrap
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import util

from lightning_asyncpp.pipeline.errors import ProtocolError

_MARK = "_asyncpp_cause"
MAX_LINE = 1000
"""Characters of an error in one line that others are told."""
MAX_TRACE = 2**14
"""Characters of its traceback that others are told: the last ones."""


@dataclass(frozen=True)
class Cause:
    """The first thing that went wrong.

    Attributes:
        rank: where.
        stage: of that rank.
        what: in one line: the error, or why the rank is thought to be gone.
        trace: the traceback of the error; empty for a rank that is gone.
    """

    rank: int
    stage: int
    what: str
    trace: str = ""

    @classmethod
    def raised(cls, rank: int, stage: int, error: BaseException) -> Cause:
        """An error of that rank; it may have been raised or not."""
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
        if len(trace) > MAX_TRACE:
            trace = f"...\n{trace[-MAX_TRACE:]}"
        text = "".join(traceback.format_exception_only(type(error), error))
        return cls(rank, stage, textwrap.shorten(text, MAX_LINE, placeholder=" ..."), trace)

    @property
    def is_error(self) -> bool:
        """Whether the rank raised something; else it is gone."""
        return bool(self.trace)

    @property
    def line(self) -> str:
        """It in one line."""
        return f"rank {self.rank} (stage {self.stage}) {'failed first: ' if self.is_error else 'is gone: '}{self.what}"

    @property
    def text(self) -> str:
        """It as a whole."""
        return f"{self.line}\n\n{textwrap.indent(self.trace, '    ')}" if self.is_error else self.line

    def pack(self) -> bytes:
        """It as others receive it: JSON."""
        return json.dumps(asdict(self), ensure_ascii=False).encode(errors="replace")

    @classmethod
    def unpack(cls, data: bytes) -> Cause:
        """Read what :meth:`pack` wrote.

        Raises:
            ProtocolError: it did not write this.
        """
        try:
            read = json.loads(data)
            cause = cls(**read)
        except (ValueError, TypeError, RecursionError) as error:
            raise ProtocolError(f"this is no account of an error: {error!r}") from None
        kinds = {"rank": int, "stage": int, "what": str, "trace": str}
        if not all(type(getattr(cause, name)) is kind for name, kind in kinds.items()):
            raise ProtocolError(f"this is no account of an error: {textwrap.shorten(str(read), 200)}")
        return cause


def mark(error: BaseException, cause: Cause) -> None:
    """Note on an error what went wrong first: whoever holds the error otherwise would keep its frames alive."""
    with suppress(AttributeError, TypeError):  # a class of errors with slots, or of a C extension
        setattr(error, _MARK, cause)


def cause_of(error: BaseException | None) -> Cause | None:
    """What is noted on an error, or on the one that it came from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(cause := getattr(error, _MARK, None), Cause):
            return cause
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


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


_STDERR = 2


class LastWord:
    """The end of this process, in which any number of runs may have failed, one after another.

    A run is entered by all ranks together; so whoever enters one has caught what ended those before it.

    Attributes:
        children: the processes of other ranks to look after; Lightning no longer does.
    """

    def __init__(self) -> None:
        self.children: list[subprocess.Popen] = []
        self._place = (0, 0)
        self._patience = 0.0
        self._failure: Cause | None = None  # of the newest run, if that failed
        self._unheard: list[Cause] = []
        self._at_exit = AtExit(self.speak)

    def cancel(self) -> None:
        """Say nothing."""
        self._at_exit.cancel()

    def enter(self, rank: int, stage: int) -> None:
        """A run begins on all ranks: what failed before was caught on all."""
        self._place = (rank, stage)
        self._failure = None
        self._unheard.clear()

    def adopt(self, children: list[subprocess.Popen], patience: float) -> None:
        """Take over processes, which have ``patience`` seconds to end after this one."""
        self.children += children
        self._patience = max(self._patience, patience)
        children.clear()

    def learn(self, cause: Cause) -> None:
        """The run failed, and the script of this rank does not know it."""
        self._failure = cause
        self._unheard.append(cause)

    def hear(self, cause: Cause) -> None:
        """The run failed, and the script of this rank knows it."""
        self._failure = cause
        self._unheard = [other for other in self._unheard if other != cause]

    def kill(self) -> None:
        """End the children at once."""
        for child in self.children:
            child.kill()

    def speak(self) -> None:
        """The process ends: wait for the children, and say what ended the run."""
        error = uncaught()
        others_failed = self._wait(is_failing=error is not None or self._failure is not None)
        if self._unheard:  # the script ended as if nothing had happened
            say(self._unheard[0].line)
            sys.stdout.flush()
            os._exit(1)
        if self.children and (line := self._line(error, others_failed)):
            say(line)

    def _wait(self, is_failing: bool) -> bool:
        """Whether a child failed, too, or had to be killed: none outlives a run that failed."""
        deadline = time.monotonic() + self._patience
        killed = False
        for child in self.children:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                if is_failing:
                    killed = True
                    child.kill()
                    child.wait()
        # Threads of a failed run may crash a process that ends well: a signal says nothing about the script.
        return killed or any((child.returncode or 0) > 0 for child in self.children)

    def _line(self, error: BaseException | None, others_failed: bool) -> str:
        if error is None or isinstance(error, SystemExit):
            # Python hides sys.exit() from what runs at the end; but the children run the same script.
            failed = self._failure if error is not None or others_failed else None
            return failed.line if failed is not None else ""
        if (cause := cause_of(error)) is not None:
            return cause.line
        rank, stage = self._place  # nobody watched, so a rank that failed before it may not be known
        return f"rank {rank} (stage {stage}) failed: {Cause.raised(rank, stage, error).what}"


_words: dict[int, LastWord] = {}


def last_word() -> LastWord:
    """That of this process; one that is forked from it has its own."""
    process = os.getpid()
    if process not in _words:
        _words.clear()
        _words[process] = LastWord()
    return _words[process]


def say(line: str) -> None:
    """Write a line to where errors go, past all buffers."""
    os.write(_STDERR, f"asyncpp: {line}\n".encode())
