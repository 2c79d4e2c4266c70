"""What a rank does when it fails or learns that another one did: say so, end in time, and leave no process behind."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import subprocess
import threading
import weakref
from contextlib import suppress
from typing import Protocol

from lightning_asyncpp.core.failures.at_exit import AtExit, uncaught
from lightning_asyncpp.core.failures.cause import Cause, cause_of, mark
from lightning_asyncpp.core.failures.heartbeat import End, meet
from lightning_asyncpp.core.failures.last_word import last_word, say
from lightning_asyncpp.core.ranks.alike import is_alike
from lightning_asyncpp.core.ranks.mesh import GRACE_SECONDS, Mesh
from lightning_asyncpp.errors import ConfigurationError, ConsequenceError, PeerLostError, is_noise

TOLD_SECONDS = 2.0
"""How long a rank that lost a neighbour waits to be told why."""
_LEAST_LEAVE_SECONDS = 10.0
_STDERR = 2
_DECIDING = threading.Lock()
"""Held while the script's thread or the watch's decides who is first; not a guard's own, which can be copied."""


class Watched(Protocol):
    """What a guard watches over for: the failure watch of a session."""

    def lose(self, error: PeerLostError, is_gone: bool) -> None:
        """Another rank failed, or is gone; called in a thread of the watch."""

    def disconnect(self) -> None:
        """The process ends after a failure: no other rank is to wait for it."""


class Guard:
    """Watches over a session, from its connection to its end.

    Args:
        limit: seconds without a sign of life after which a rank is gone; ``None``: nobody watches.
        watched: the session, which the guard does not keep alive.

    Attributes:
        children: the processes of other ranks that this one started: the launcher's own list.
        is_torn_down: whether an error reaches the script only after a teardown, as with the Trainer.
    """

    def __init__(self, limit: float | None, watched: Watched) -> None:
        self.children: list[subprocess.Popen] = []
        self.is_torn_down = False
        self._limit, self._watched = limit, weakref.ref(watched)
        self._mesh: Mesh | None = None
        self._end: End | None = None
        self._cause: Cause | None = None  # what went wrong first, as far as this rank knows
        self._is_heard = False  # whether the script of this rank knows of it
        self._stopped: int | None = None
        self._deadline: threading.Timer | None = None
        self._is_released = False
        self._at_exit: AtExit | None = None
        weakref.finalize(watched, self.end).atexit = False

    def __reduce__(self) -> tuple:
        """A copy, as one in a spawned process, watches over nothing yet."""
        return Guard, (self._limit, self._watched()), {"is_torn_down": self.is_torn_down}

    def begin(self, mesh: Mesh) -> None:
        """Watch, unless this is done already or there is nobody else; a collective call.

        Raises:
            PeerLostError: a rank cannot be reached.
        """
        if mesh.groups is None:
            return
        self._mesh = mesh
        if self._limit is None or self._end is not None:
            return
        self._cause, self._is_heard, self._stopped = None, False, None
        self._is_released = False
        self._end = meet(mesh, self._limit, self._learn)
        last_word().enter(mesh.rank, mesh.stage)  # before this guard's own end is registered: it comes after that
        self._at_exit = self._at_exit or AtExit(self._exit)
        self._end.start()

    def leave(self, error: BaseException) -> None:
        """Before :meth:`fail`: if the scripts of all ranks call ``sys.exit(0)`` here, their user wants it: no failure.

        A rank that does it alone has failed, as its exit code says.
        """
        if self._end is None or self._is_heard or not isinstance(error, SystemExit) or error.code not in (None, 0):
            return
        assert self._mesh is not None
        # Rank 0 decides; the others wait until they have heard that it is not so.
        if self._end.leave(GRACE_SECONDS + TOLD_SECONDS * (self._mesh.rank != 0)):
            self._is_heard = True
            return
        error.code = 1
        error.args = ("0 on this rank, while others go on: call sys.exit() on all ranks, at the same place",)

    def fail(self, error: BaseException) -> None:
        """Tell the others of an error of this rank; into one that is of another's making put what that one was.

        If a teardown follows, this rank has to be through with it in time, until :meth:`release`.
        """
        if self._end is None or self._is_heard:
            return
        with _DECIDING:
            self._is_heard = True
        if isinstance(error, ConsequenceError) or is_noise(error):
            cause = self._end.wait_for_cause(TOLD_SECONDS)
            if cause is not None and (isinstance(error, PeerLostError) or is_noise(error)):
                error.args = (self._words(cause),)
        if self._end.cause is None:
            self._report(error)
        self._hear(error, self._end.cause or self._cause)
        if self.is_torn_down:
            self._hurry()
        else:
            self.release()

    def release(self) -> None:
        """The error is in the hands of the script, which may take its time, also if the watch learns of one later."""
        with _DECIDING:
            self._is_released = True
            if self._deadline is not None:
                self._deadline.cancel()

    def end(self) -> None:
        """Say goodbye, and watch no longer."""
        if self._end is None:
            return
        end, self._end = self._end, None
        end.end()
        if self._cause is None and self._at_exit is not None:
            self._at_exit.cancel()
            self._at_exit = None

    # -- failing --------------------------------------------------------------------------------------------------

    @staticmethod
    def _hear(error: BaseException, cause: Cause | None) -> None:
        """The script has the error: it may catch it, or end with it."""
        if cause is not None:
            mark(error, cause)
            last_word().hear(cause, is_alike(error))

    def _report(self, error: BaseException) -> None:
        assert self._mesh is not None
        self._cause = Cause.raised(self._mesh.rank, self._mesh.stage, error)
        if self._end is not None:
            self._end.report(self._cause)
        if not isinstance(error, (ConfigurationError, KeyboardInterrupt)):
            self._adopt()

    def _learn(self, cause: Cause) -> None:
        end = self._end
        if self._cause is not None or end is None:
            return  # the error of this rank was the first, or as good as that; or nobody watches any longer
        self._cause, self._stopped = cause, end.stopped
        with _DECIDING:
            if not self._is_heard:
                last_word().learn(cause)
        self._adopt()
        self._hurry()
        if (watched := self._watched()) is not None:
            watched.lose(PeerLostError(self._words(cause)), not cause.is_error)

    def _words(self, cause: Cause) -> str:
        """What this rank says of it: everything on rank 0, where users look."""
        assert self._mesh is not None
        if cause.rank == self._mesh.rank and not cause.is_error:
            return f"the other ranks gave this one up: {cause.what}"
        return cause.line if self._mesh.rank else cause.text

    def _adopt(self) -> None:
        """Look after the children from now on: Lightning would kill this rank, too, before it has said why it ends."""
        last_word().adopt(self.children, self._leave_seconds)

    # -- ending in time -------------------------------------------------------------------------------------------

    @property
    def _leave_seconds(self) -> float:
        return max((self._limit or 0.0) / 2, _LEAST_LEAVE_SECONDS)

    def _hurry(self) -> None:
        with _DECIDING:
            if self._is_released or (self._deadline is not None and not self._deadline.finished.is_set()):
                return
            self._deadline = threading.Timer(self._leave_seconds, self._leave_now)
            self._deadline.daemon = True
            self._deadline.start()

    def _leave_now(self) -> None:
        """The main thread waits for something that does not come: show where it is, and end without it."""
        assert self._mesh is not None
        assert self._cause is not None
        for child in multiprocessing.active_children():  # loaders' workers may hang, too
            if child.daemon:
                child.kill()
        faulthandler.dump_traceback(_STDERR)
        place = f"rank {self._mesh.rank} (stage {self._mesh.stage})"
        say(f"{place} did not end by itself within {self._leave_seconds:g} s after this: {self._cause.line}")
        last_word().kill()
        self._kill_stopped()
        os._exit(1)

    def _exit(self) -> None:
        """The process ends, in whichever way; what there is to say about it comes last of all."""
        if self._cause is None:
            error = uncaught()
            if error is None:
                self.end()
                return
            self._is_heard = True
            self._report(error)
            self._hear(error, cause_of(error) or self._cause)
        if (watched := self._watched()) is not None:
            watched.disconnect()
        self._kill_stopped()

    def _kill_stopped(self) -> None:
        if self._stopped is not None:
            with suppress(OSError):
                os.kill(self._stopped, signal.SIGKILL)
