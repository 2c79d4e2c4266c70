"""How a rank that failed ends the others' waiting, though its own process lives on.

The connections of a process that ends are closed, which the others notice at once. A process that catches the error of
a run and turns to something else would let them wait until the timeout; so it closes the connections itself.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_asyncpp.pipeline.errors import PeerLostError
from lightning_asyncpp.pipeline.mesh import GRACE_SECONDS, Mesh
from lightning_asyncpp.pipeline.transport import Transport

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
    timer = threading.Timer(grace, _hang_up, [mesh.groups.on_host(), transport])
    timer.daemon = True  # a process that ends needs no grace
    timer.start()


def _hang_up(groups: list[dist.ProcessGroup], transport: Transport | None) -> None:
    if transport is not None:
        transport.hang_up()
    for group in groups:
        with suppress(KeyError):  # nothing used the group any more, and it is gone
            for rank in dist.get_process_group_ranks(group):
                if rank != dist.get_rank():
                    _wait_in_vain(group, rank)


def _wait_in_vain(group: dist.ProcessGroup, rank: int) -> None:
    # Gloo closes all connections of a group in which a wait timed out; no call does just that. With a rank that is gone
    # the wait fails before it begins, and at the very end of a process the group may be gone.
    with suppress(RuntimeError, ValueError):
        work = dist.irecv(torch.zeros(1, device="cpu"), rank, group=group, tag=_TAG_NEVER_SENT)
        if work is not None:
            work.wait(_MOMENT)
