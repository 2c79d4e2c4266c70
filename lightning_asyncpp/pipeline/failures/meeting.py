"""Connects all ranks with rank 0, on connections of their own: training waits in the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack

from lightning_asyncpp.pipeline.failures.cause import Cause
from lightning_asyncpp.pipeline.failures.ends import End, Hub, Member
from lightning_asyncpp.pipeline.failures.wire import Wire
from lightning_asyncpp.pipeline.ranks.agreement import exchange
from lightning_asyncpp.pipeline.ranks.mesh import Mesh
from lightning_asyncpp.pipeline.ranks.rendezvous import Listener, call

_AT_A_TIME = 64  # a listener each; files that a process may have open are few


def meet(mesh: Mesh, limit: float, on_cause: Callable[[Cause], None]) -> End:
    """Connect this rank's end; a collective call.

    Args:
        mesh: this rank's place, of several; its groups are connected.
        limit: seconds without a sign of life after which a rank is gone.
        on_cause: called once, in a thread, when something went wrong on another rank.

    Raises:
        PeerLostError: a rank cannot be reached.
    """
    wires: dict[int, Wire] = {}
    for first in range(1, mesh.world_size, _AT_A_TIME):
        wires |= _meet(mesh, range(first, min(first + _AT_A_TIME, mesh.world_size)))
    stages = [mesh.stage_of(rank) for rank in range(mesh.world_size)]
    return (Member if mesh.rank else Hub)(wires, stages, limit, on_cause)


def _meet(mesh: Mesh, ranks: range) -> dict[int, Wire]:
    """Connect some of the ranks with rank 0: each is known by the secret of the listener that it calls."""
    with ExitStack() as closing:
        listeners = {} if mesh.rank else {rank: closing.enter_context(Listener()) for rank in ranks}
        offers = exchange(mesh, json.dumps([listener.offer for listener in listeners.values()]))[0]
        if mesh.rank in ranks:
            offer = json.loads(offers)[mesh.rank - ranks.start]
            return {0: Wire(call(offer, _name(mesh, 0), _name(mesh, mesh.rank)))}
        return {rank: Wire(listener.answer(_name(mesh, rank))) for rank, listener in listeners.items()}


def _name(mesh: Mesh, rank: int) -> str:
    return f"rank {rank} (stage {mesh.stage_of(rank)})"
