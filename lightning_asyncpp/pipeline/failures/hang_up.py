"""How a rank that failed ends the others' waiting, though its own process lives on.

The connections of a process that ends are closed, which the others notice at once. A process that catches the error of
a run and turns to something else would let them wait until the timeout; so it closes the connections itself.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_asyncpp.pipeline.errors import PeerLostError
from lightning_asyncpp.pipeline.failures import background
from lightning_asyncpp.pipeline.ranks.mesh import GRACE_SECONDS, Mesh
from lightning_asyncpp.pipeline.wire.transport import Transport

_TAG_NEVER_SENT = 6
_MOMENT = timedelta(milliseconds=1)


def hang_up_soon(mesh: Mesh, error: BaseException, transport: Transport | None = None) -> None:
    """Close this rank's connections, in the background, after a grace period if need be.

    The groups are of no use afterwards; torch's default group, which later runs start from, is left alone.

    Args:
        mesh: this rank's place.
        error: why; nobody agrees on the loss of a peer, so that is passed on at once.
        transport: the connections with the neighbours, if there are any.
    """
    if mesh.groups is None:
        return
    grace = 0.0 if isinstance(error, PeerLostError) else GRACE_SECONDS
    background.run_later(grace, lambda: hang_up(mesh, transport))  # a process that ends needs no grace


def hang_up(mesh: Mesh, transport: Transport | None = None) -> None:
    """Close this rank's connections: waits of this rank and of others end.

    Args:
        mesh: this rank's place.
        transport: the connections with the neighbours, if there are any.
    """
    if transport is not None:
        transport.hang_up()
    if mesh.groups is None:
        return
    for group in mesh.groups.on_host():
        _close(group)
    for group in mesh.groups.on_devices():
        _abort(group)


def leave_default_group() -> None:
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
