"""What a process says when it ends, below all that its children said: the failure that ended the run, if one did."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from lightning_asyncpp.core.failures.at_exit import AtExit, uncaught
from lightning_asyncpp.core.failures.cause import Cause, cause_of
from lightning_asyncpp.core.ranks.alike import is_alike

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

    def hear(self, cause: Cause, is_alike: bool = False) -> None:
        """The run failed, and the script of this rank knows it; what all raise alike, rank 0 says by itself."""
        self._failure = None if is_alike else cause
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
        if is_alike(error):
            return ""  # rank 0 has shown it
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
