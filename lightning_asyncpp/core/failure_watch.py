"""Handling of failures: report the first cause, make later calls raise, and end other ranks' waits.

The first cause is the error of the rank that failed first. When a process ends, its connections are closed, and its
neighbours notice this at once. If a script catches the error and goes on, its neighbours would wait until the timeout.
So the failed rank closes its connections itself.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import secrets
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from lightning_asyncpp.core import background
from lightning_asyncpp.core.first_cause import POLL_SECONDS, AtExit, Cause, FirstCause, uncaught
from lightning_asyncpp.core.ranks.agreement import broadcast
from lightning_asyncpp.core.ranks.mesh import GRACE_SECONDS, Mesh
from lightning_asyncpp.core.wire.transport import Transport
from lightning_asyncpp.errors import ConsequenceError, PeerLostError, is_alike, is_noise, peer_lost

CAUSE_SECONDS = 2 * POLL_SECONDS
"""Seconds that a rank waits for the first cause after it noticed that another rank is gone."""
LEAVE_SECONDS = 30.0
"""Seconds that a rank may take to end after a failure, before it is terminated."""
_STDERR = 2
_TAG_NEVER_SENT = 6
_MOMENT = timedelta(milliseconds=1)
_DECIDING = threading.Lock()
"""Lock, since several threads may set the failure; global, since a watch must be copyable, and locks are not."""


class FailureWatch:
    """Handling of a failure on any rank of a session.

    Call :meth:`start` when the ranks are connected, and :meth:`set_transport` when the engine exists. Pass every error
    to :meth:`fail`. Before a wait for other ranks, call :meth:`check` and enter :meth:`collective`.

    Attributes:
        failure: first failure, after which no collective can run.
        children: processes of other ranks that this rank launched; the same list object as the launcher's.
    """

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self.children: list[subprocess.Popen] = []
        self._taken_over: list[subprocess.Popen] = []
        self._mesh: Mesh | None = None
        self._transport: Transport | None = None
        self._agreed_end: Callable[[], bool] | None = None
        self._unraised: PeerLostError | None = None  # another rank's failure, not raised in this script yet
        self._first: FirstCause | None = None
        self._at_exit: AtExit | None = None
        self._deadline: threading.Timer | None = None
        self._wait_for_children: Callable[[], None] | None = None

    def start(self, mesh: Mesh) -> None:
        """Begin to watch the other ranks, if there are any, for failures; a collective call.

        Later calls do nothing.

        Raises:
            PeerLostError: a rank cannot be reached.
        """
        self._mesh = mesh
        if mesh.groups is None or self._first is not None:
            return
        self._wait_for_children = None
        key = broadcast(mesh, f"lightning_asyncpp/{secrets.token_hex(8)}", 0)
        watch = weakref.ref(self)  # weak, since the thread and the exit handler must not keep a session alive
        self._first = FirstCause(
            key, mesh.name_of(0), lambda cause: _call(watch, FailureWatch._on_remote_failure, cause)
        )
        self._at_exit = AtExit(lambda: _call(watch, FailureWatch._end_process))
        weakref.finalize(self, _stop_watching, self._first, self._at_exit).atexit = False

    def set_transport(self, transport: Transport | None, ended_as_agreed: Callable[[], bool]) -> None:
        """Set the connections and the end condition of a new engine.

        Args:
            transport: connections to the neighbours, if any.
            ended_as_agreed: function that returns whether all ranks have agreed to end and nothing is in flight. If
                so, an exception is no failure.
        """
        self._transport, self._agreed_end = transport, ended_as_agreed

    def check(self) -> None:
        """Raise if the pipeline has failed, since other ranks no longer answer.

        Raises:
            PeerLostError: another rank failed or is gone, and no error has been raised in this script yet.
            RuntimeError: the pipeline failed before.
        """
        if self._unraised is not None:
            raise self._unraised
        if self.failure is not None:
            raise RuntimeError(
                f"the pipeline has failed and cannot go on: {type(self.failure).__name__}: {self.failure}"
            ) from self.failure

    def fail(self, error: BaseException) -> None:
        """Record an error, if it is the first. From then on every collective raises one here, and soon on all ranks.

        If another rank's error caused the failure, the first cause replaces the text of ``error``. This call also
        cancels the deadline of :meth:`set_deadline`; if a teardown follows, set it again.
        """
        with _DECIDING:
            is_first, self._unraised = self.failure is None, None
            if is_first:
                self.failure = error
            self.cancel_deadline()
        ends_well = isinstance(error, SystemExit) and error.code in (None, 0)  # a planned end
        if not (ends_well or (self._agreed_end is not None and self._agreed_end())):
            self._report(error)
        if is_first:
            self._disconnect_soon(error)

    def reset(self) -> None:
        """Forget the failure, before a new run."""
        self.failure = None

    def set_deadline(self) -> None:
        """End this process after :data:`LEAVE_SECONDS`, unless :meth:`cancel_deadline` is called before."""
        if self._first is not None:
            self._deadline = threading.Timer(LEAVE_SECONDS, self._kill_process)
            self._deadline.daemon = True
            self._deadline.start()

    def cancel_deadline(self) -> None:
        """Cancel the deadline, since the script has received the error."""
        if self._deadline is not None:
            self._deadline.cancel()

    def close(self) -> None:
        """Stop watching."""
        if self._first is not None and self._at_exit is not None:
            _stop_watching(self._first, self._at_exit)
            self._first = self._at_exit = None

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Run a collective in this context; if a rank is lost meanwhile, the session has failed.

        Raises:
            PeerLostError: another rank is gone; the message has the first cause, if known.
        """
        try:
            yield
        except PeerLostError as error:
            self.fail(error)
            raise
        except RuntimeError as error:
            if self._unraised is None and not is_noise(error):
                raise
            lost = peer_lost(None, error)
            self.fail(lost)
            raise lost from None

    # -- an error of this rank ------------------------------------------------------------------------------------

    def _report(self, error: BaseException) -> None:
        """Report an error of this rank; if it is a lost connection, the first cause replaces the error's text."""
        if self._first is None or self._mesh is None:
            return
        is_lost = isinstance(error, PeerLostError) or is_noise(error)
        if (is_lost or isinstance(error, ConsequenceError)) and getattr(error, "peer", None) is None:
            self._first.wait(CAUSE_SECONDS)
        met = peer_lost(None, error) if is_lost and not isinstance(error, PeerLostError) else error
        cause = self._first.report(Cause.of(met, self._mesh.name_of(self._mesh.rank)), CAUSE_SECONDS)
        if is_lost:
            error.args = (self._message_for_this_rank(cause),)
        if not isinstance(error, KeyboardInterrupt):
            self._take_over_children(0.0 if is_alike(error) else CAUSE_SECONDS)

    def _disconnect_soon(self, error: BaseException) -> None:
        """End this rank's connections in the background.

        After a lost connection this happens at once. After any other error it happens later, since all ranks may be
        about to raise the same error.
        """
        if self._mesh is not None and self._mesh.groups is not None:
            grace = 0.0 if isinstance(error, PeerLostError) else GRACE_SECONDS
            background.run_later(grace, partial(abort_connections, self._mesh, self._transport))

    # -- an error of another rank ----------------------------------------------------------------------------------

    def _on_remote_failure(self, cause: Cause) -> None:
        """End this rank's waits after another rank's failure, so that this script ends; runs in the watch's thread."""
        with _DECIDING:
            if self.failure is not None:
                return  # the script already has an error, which fail() handles
            self._take_over_children(CAUSE_SECONDS)
            self.set_deadline()
        error = PeerLostError(self._message_for_this_rank(cause))
        grace = GRACE_SECONDS if cause.trace else 0.0  # all ranks may be about to raise the same error
        background.run_later(grace, lambda: self._give_up(error))
        background.run_later(2 * grace, self._give_up_default_group)

    def _message_for_this_rank(self, cause: Cause) -> str:
        """Return the message for this rank: the full text on rank 0, where users look; one line on other ranks."""
        return cause.line if self._mesh is not None and self._mesh.rank else cause.text

    def _give_up(self, error: PeerLostError) -> None:
        with _DECIDING:
            if self.failure is None:
                self.failure = self._unraised = error
        abort_connections(self._mesh, self._transport)

    def _give_up_default_group(self) -> None:
        if self._unraised is not None:
            abort_default_group()

    # -- the end of the process -----------------------------------------------------------------------------------

    def _end_process(self) -> None:
        """At exit, report an error raised outside of this session's calls, or print an error of another rank."""
        if self.failure is None and (error := uncaught()) is not None:
            self.fail(error)
            if self._wait_for_children is not None:  # handlers registered during exit are not called
                self._wait_for_children()
        is_raised = self.failure is not None and self._unraised is None
        if self._first is not None and self._first.cause is not None and not is_raised:
            sys.stdout.flush()
            os.write(_STDERR, f"asyncpp: {self._first.cause.line}\n".encode())
            os._exit(1)
        if self._first is not None and self._wait_for_children is None:
            self._first.stop()  # a script may end without close(), and the end waits for the thread

    def _take_over_children(self, stays: float) -> None:
        """Take over the launched processes from the launcher.

        If a process failed, the launcher would kill the others, this rank included, before the error is reported.

        Args:
            stays: seconds for which other ranks need torch's store; ignored unless this rank serves the store.
        """
        if self._wait_for_children is not None or self._first is None or self._mesh is None:
            return
        self._taken_over = list(self.children)
        self.children.clear()
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or self._mesh.rank:
            stays = 0.0
        self._wait_for_children = partial(_wait_for_children, self._taken_over, self._first, time.monotonic() + stays)
        AtExit(self._wait_for_children)

    def _kill_process(self) -> None:
        """Print where the main thread hangs, and end the process."""
        for worker in multiprocessing.active_children():  # data loader workers may hang, too
            if worker.daemon:
                worker.kill()
        faulthandler.dump_traceback(_STDERR)
        first = self._first.cause if self._first is not None else None
        why = first.line if first is not None else repr(self.failure)
        text = f"asyncpp: this rank did not end within {LEAVE_SECONDS:g} s after this: {why}\n"
        os.write(_STDERR, text.encode())  # not through Python's buffers
        for child in self._taken_over:
            child.kill()
        os._exit(1)


def _wait_for_children(children: list[subprocess.Popen], first: FirstCause, until: float) -> None:
    """Keep this process alive until the ranks that it launched have ended and others had time to read the first cause.

    Args:
        children: launched processes; if this script failed, those that do not end in time are killed.
        first: this rank's access to the first cause; its reference keeps torch's store alive until this function
            returns.
        until: time of ``time.monotonic()`` until which other ranks may read the first cause.
    """
    deadline = time.monotonic() + LEAVE_SECONDS
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            if uncaught() is not None:
                child.kill()
                child.wait()
    time.sleep(max(0.0, until - time.monotonic()))
    first.stop()


def _stop_watching(first: FirstCause, at_exit: AtExit) -> None:
    first.stop()
    at_exit.cancel()


def _call(watch: weakref.ref[FailureWatch], method: Callable[..., None], *args: Cause) -> None:
    if (alive := watch()) is not None:
        method(alive, *args)


def abort_connections(mesh: Mesh | None, transport: Transport | None) -> None:
    """End a rank's connections to its neighbours and its process groups, so that no rank waits for this rank.

    The groups cannot be used afterwards. Torch's default group is kept, since later runs need it.
    """
    if transport is not None:
        transport.abort()
    if mesh is None or mesh.groups is None:
        return
    for group in mesh.groups.on_host():
        _close(group)
    for group in mesh.groups.on_devices():
        _abort(group)


def abort_default_group() -> None:
    """End this rank's waits in torch's default group; the group cannot be used afterwards."""
    if dist.is_initialized() and (group := dist.group.WORLD) is not None:
        config = dist.get_backend_config(group)
        if "gloo" in config:
            _close(group)
        if "nccl" in config:
            _abort(group)


def _close(group: dist.ProcessGroup) -> None:
    """End all connections of a gloo group by waits that time out; gloo has no call for this."""
    with suppress(KeyError, ValueError):  # the group has been destroyed
        for rank in dist.get_process_group_ranks(group):
            # The wait fails at once if the rank is gone, or if the group has been destroyed at exit.
            with suppress(RuntimeError, ValueError):
                if rank != dist.get_rank():
                    work = dist.irecv(torch.zeros(1, device="cpu"), rank, group=group, tag=_TAG_NEVER_SENT)
                    if work is not None:
                        work.wait(_MOMENT)


def _abort(group: dist.ProcessGroup) -> None:
    """Abort a device group, in a thread.

    The call may wait for the device, and the device may wait for another group's message from a rank that is gone.
    """

    def abort() -> None:
        with suppress(RuntimeError):  # the group is gone, or its backend cannot abort
            group.abort()

    background.run(abort, "abort")
