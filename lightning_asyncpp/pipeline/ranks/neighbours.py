"""Connects every stage with the stage before and the stage after it.

Every stage but the first listens, tells all ranks where, and is called by the stage before: see
:mod:`lightning_asyncpp.pipeline.ranks.rendezvous`.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import NamedTuple

from lightning_asyncpp.pipeline.ranks.agreement import exchange
from lightning_asyncpp.pipeline.ranks.mesh import Mesh
from lightning_asyncpp.pipeline.ranks.rendezvous import Listener, call
from lightning_asyncpp.pipeline.wire.link import Link


class Neighbours(NamedTuple):
    """Links with the stage before and the stage after; None at the ends of the pipeline."""

    before: Link | None
    after: Link | None


def connect_neighbours(mesh: Mesh, before: float | None = None, after: float | None = None) -> Neighbours:
    """Connect the stages of every replica; a collective call.

    Args:
        mesh: this rank's place; its groups are connected.
        before: seconds that a wait for the stage before may take; default: half an hour.
        after: the same for the stage after.

    Raises:
        PeerLostError: a neighbour cannot be reached.
    """
    with ExitStack() as closing:
        listener = None if mesh.is_first else closing.enter_context(Listener())
        offers = exchange(mesh, "" if listener is None else listener.offer)
        there = None
        if not mesh.is_last:
            next_stage = mesh.stage + 1
            there = call(offers[mesh.rank_of(next_stage)], mesh.name_of(next_stage), f"stage {mesh.stage}")
        here = None if listener is None else listener.answer(mesh.name_of(mesh.stage - 1))
    ends = ((here, mesh.stage - 1, before), (there, mesh.stage + 1, after))
    return Neighbours(*(None if c is None else Link(c, mesh.name_of(stage), seconds) for c, stage, seconds in ends))
