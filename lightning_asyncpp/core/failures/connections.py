"""End the connections of a rank, so that nobody waits any more: those with its neighbours, and its process groups."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_asyncpp.core import background
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.wire.transport import Transport

_TAG_NEVER_SENT = 6
_MOMENT = timedelta(milliseconds=1)


def end(mesh: Mesh | None, transport: Transport | None) -> None:
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
