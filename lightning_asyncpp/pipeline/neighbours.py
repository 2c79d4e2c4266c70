"""Connects every stage with the stage before and the stage after it.

Every stage but the first listens, tells all ranks where, and is called by the stage before: see
:mod:`lightning_asyncpp.pipeline.rendezvous`.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import NamedTuple

from lightning_asyncpp.pipeline.agreement import exchange
from lightning_asyncpp.pipeline.link import Link
from lightning_asyncpp.pipeline.mesh import Mesh
from lightning_asyncpp.pipeline.rendezvous import Listener, call


class Neighbours(NamedTuple):
    """Links with the stage before and the stage after; None at the ends of the pipeline."""

    before: Link | None
    after: Link | None


def connect_neighbours(mesh: Mesh, timeout: float | None = None) -> Neighbours:
    """Connect the stages of every replica; a collective call.

    Args:
        mesh: this rank's place; its groups are connected.
        timeout: seconds that a wait in the links may take; default: half an hour.

    Raises:
        PeerLostError: a neighbour cannot be reached.
    """
    with ExitStack() as closing:
        listener = None if mesh.is_first else closing.enter_context(Listener())
        offers = exchange(mesh, "" if listener is None else listener.offer)
        after = None
        if not mesh.is_last:
            next_stage = mesh.stage + 1
            after = call(offers[mesh.rank_of(next_stage)], mesh.name_of(next_stage), f"stage {mesh.stage}")
        before = None if listener is None else listener.answer(mesh.name_of(mesh.stage - 1))
    ends = ((before, mesh.stage - 1), (after, mesh.stage + 1))
    return Neighbours(*(None if c is None else Link(c, mesh.name_of(stage), timeout) for c, stage in ends))
