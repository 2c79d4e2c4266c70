"""How a session fails: what its ranks were told, what later calls raise, and what ends their waits.

The connections of a process that ends are closed, which the others notice at once. A process that catches the error of
a run and turns to something else would let them wait until the timeout; so it closes the connections itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from lightning_asyncpp.core import background
from lightning_asyncpp.core.failures.guard import Guard
from lightning_asyncpp.core.ranks.mesh import GRACE_SECONDS, Mesh
from lightning_asyncpp.core.wire.transport import Transport
from lightning_asyncpp.errors import PeerLostError, is_noise, peer_lost

_TAG_NEVER_SENT = 6
_MOMENT = timedelta(milliseconds=1)


class FailureWatch:
    """What a session holds for the case that one of its ranks fails.

    :meth:`begin` when the ranks are connected, :meth:`started` when there is an engine. Whoever meets an error gives it
    to :meth:`fail`, and what waits for other ranks runs within :meth:`collective`, after a :meth:`check`.

    Args:
        heartbeat: seconds without a sign of life after which a rank is gone; ``None``: nobody watches.

    Attributes:
        failure: the first one; there is no collective after it.
        guard: hears from the other ranks and tells them, as long as they are watched over.
    """

    def __init__(self, heartbeat: float | None) -> None:
        self.failure: BaseException | None = None
        self.guard = Guard(heartbeat, self)
        self._mesh: Mesh | None = None
        self._transport: Transport | None = None
        self._agreed_end: Callable[[], bool] | None = None
        self._unheard: PeerLostError | None = None  # a failure of another rank that this one's script does not know

    def begin(self, mesh: Mesh) -> None:
        """Watch over this rank, unless this is done already; a collective call.

        Raises:
            PeerLostError: a rank cannot be reached.
        """
        self._mesh = mesh
        self.guard.begin(mesh)

    def started(self, transport: Transport | None, ended_as_agreed: Callable[[], bool]) -> None:
        """There is an engine.

        Args:
            transport: its connections with the neighbours, if it has any.
            ended_as_agreed: whether all ranks have agreed to end here, and finished what was in flight: what is raised
                then is no failure of this rank.
        """
        self._transport, self._agreed_end = transport, ended_as_agreed

    def check(self) -> None:
        """Refuse to go on after a failure: nobody would answer.

        Raises:
            PeerLostError: another rank failed, or is gone, and the script of this one has not been told yet.
            RuntimeError: the pipeline failed before.
        """
        if self._unheard is not None:
            raise self._unheard
        if self.failure is not None:
            raise RuntimeError(
                "the pipeline failed and its ranks no longer answer each other:"
                f" {type(self.failure).__name__}: {self.failure}"
            ) from self.failure

    def fail(self, error: BaseException) -> None:
        """Remember the first failure: from now on every collective of this session raises, soon on the others too.

        An error that comes from another rank's is told what that was.
        """
        self._unheard = None
        if self.failure is None:
            self.failure = error
            if not self._ended_as_agreed:
                self.guard.leave(error)
            self._disconnect_soon(error)
        if not self._ended_as_agreed:
            self.guard.fail(error)

    def lose(self, error: PeerLostError, is_gone: bool) -> None:
        """Another rank failed, as a thread of the watch learnt: end this rank's waits, so that its script does.

        Args:
            error: what to raise.
            is_gone: whether that rank is gone; else it raised something, which all ranks may be about to raise alike.
        """
        grace = 0.0 if is_gone else GRACE_SECONDS
        background.run_later(grace, lambda: self._give_up(error))
        background.run_later(2 * grace, self._give_up_default_group)

    def disconnect(self) -> None:
        """End this rank's connections at once: nobody needs them any more."""
        _end_connections(self._mesh, self._transport)

    @contextmanager
    def collective(self) -> Iterator[None]:
        """A collective runs meanwhile: if another rank is gone, the session has failed.

        Raises:
            PeerLostError: with what went wrong there, if that is known.
        """
        try:
            yield
        except PeerLostError as error:
            self.fail(error)
            raise
        except RuntimeError as error:
            if self._unheard is None and not is_noise(error):
                raise
            lost = peer_lost("a rank", error)
            self.fail(lost)
            raise lost from None

    @property
    def _ended_as_agreed(self) -> bool:
        return self._agreed_end is not None and self._agreed_end()

    def _disconnect_soon(self, error: BaseException) -> None:
        """End this rank's connections in the background, after a grace period if need be.

        Nobody agrees on the loss of a peer, so that is passed on at once; a process that ends needs no grace either.
        """
        if self._mesh is not None and self._mesh.groups is not None:
            grace = 0.0 if isinstance(error, PeerLostError) else GRACE_SECONDS
            background.run_later(grace, partial(_end_connections, self._mesh, self._transport))

    def _give_up(self, error: PeerLostError) -> None:
        if self.failure is None:
            self.failure = self._unheard = error
        self.disconnect()

    def _give_up_default_group(self) -> None:
        if self._unheard is not None:
            _leave_default_group()


def _end_connections(mesh: Mesh | None, transport: Transport | None) -> None:
    """End waits of this rank and of others.

    The groups are of no use afterwards; torch's default group, which later runs start from, is left alone.
    """
    if transport is not None:
        transport.leave_neighbours()
    if mesh is None or mesh.groups is None:
        return
    for group in mesh.groups.on_host():
        _close(group)
    for group in mesh.groups.on_devices():
        _abort(group)


def _leave_default_group() -> None:
    """End this rank's waits in torch's default group, too; nothing can be started from it any more."""
    if dist.is_initialized() and (group := dist.group.WORLD) is not None:
        config = dist.get_backend_config(group)
        if "gloo" in config:
            _close(group)
        if "nccl" in config:
            _abort(group)


def _close(group: dist.ProcessGroup) -> None:
    with suppress(KeyError, ValueError):  # nothing used the group any more, and it is gone
        for rank in dist.get_process_group_ranks(group):
            if rank != dist.get_rank():
                _wait_in_vain(group, rank)


def _abort(group: dist.ProcessGroup) -> None:
    """End what is under way in a group on devices, in a thread of its own.

    It may wait for its device, where a message of another group waits for a rank that is gone; and for that one's end.
    """
    background.run(lambda: _abort_now(group), "abort")


def _abort_now(group: dist.ProcessGroup) -> None:
    with suppress(RuntimeError):  # it is gone, or its backend has no such thing
        group.abort()


def _wait_in_vain(group: dist.ProcessGroup, rank: int) -> None:
    # Gloo closes all connections of a group in which a wait timed out; no call does just that. With a rank that is gone
    # the wait fails before it begins, and at the very end of a process the group may be gone.
    with suppress(RuntimeError, ValueError):
        work = dist.irecv(torch.zeros(1, device="cpu"), rank, group=group, tag=_TAG_NEVER_SENT)
        if work is not None:
            work.wait(_MOMENT)
