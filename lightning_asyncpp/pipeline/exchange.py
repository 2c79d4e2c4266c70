"""How control messages are summed over all ranks: without waiting for anybody who is not needed.

An all-reduce starts when the last rank joins, and takes a round of messages from then on. But gradients complete stage
by stage, from the last to the first. So with one replica the messages are summed along that way, and the first stage,
which comes last, finds the rest already there and tells the others (:class:`ControlChain`). Replicas complete in any
order: with several of them every rank sends its message to all (:class:`ControlExchange`), or beyond a number of ranks,
where that is too many messages, an all-reduce takes over.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_asyncpp.pipeline.mesh import Mesh, started

MOST_RANKS = 16
_TAG_PART, _TAG_TOTAL = 4, 5


class ControlSum(Protocol):
    """The sum over all ranks of one fp64 vector each; every rank makes its sums in the same order."""

    def send(self, message: Tensor) -> None:
        """Give this rank's vector (length,)."""

    def finish(self) -> Tensor:
        """Wait for the sum (length,)."""


def control_sum(mesh: Mesh, length: int) -> ControlSum:
    """Start a sum of vectors of ``length`` elements: receives are posted now, long before anybody sends."""
    return ControlChain(mesh, length) if mesh.num_replicas == 1 else ControlExchange(mesh, length)


class ControlChain:
    """Sums along the way of the gradients, from the last stage to the first, which then tells all.

    Args:
        mesh: this rank's place, connected; one replica.
        length: of the vectors, the same on all ranks.
    """

    def __init__(self, mesh: Mesh, length: int) -> None:
        assert mesh.groups is not None
        self.mesh, self._group = mesh, mesh.groups.control
        self._part, self._total = _zeros(length), _zeros(length)
        self._works: list[dist.Work] = []
        if not mesh.is_last:
            after = mesh.rank_of(mesh.stage + 1)
            self._part_work = started(dist.irecv(self._part, after, group=self._group, tag=_TAG_PART))
        if not mesh.is_first:
            self._works.append(started(dist.irecv(self._total, mesh.rank_of(0), group=self._group, tag=_TAG_TOTAL)))

    def send(self, message: Tensor) -> None:
        """Add this rank's vector (length,) to those of the stages behind; their gradients were complete before."""
        if not self.mesh.is_last:
            self._part_work.wait()
        self._part += message
        if not self.mesh.is_first:
            self._send(self._part, self.mesh.stage - 1, _TAG_PART)
            return
        self._total = self._part
        for stage in range(1, self.mesh.num_stages):
            self._send(self._total, stage, _TAG_TOTAL)

    def finish(self) -> Tensor:
        """Wait for the sum (length,), added from the last stage to the first."""
        return _finish(self._works, self._total)

    def _send(self, vector: Tensor, stage: int, tag: int) -> None:
        self._works.append(started(dist.isend(vector, self.mesh.rank_of(stage), group=self._group, tag=tag)))


class ControlExchange:
    """Sums what every rank sends to all others as soon as it has it.

    Args:
        mesh: this rank's place, connected.
        length: of the vectors, the same on all ranks.
    """

    def __init__(self, mesh: Mesh, length: int) -> None:
        assert mesh.groups is not None
        self.mesh = mesh
        self._group = mesh.groups.control
        self._pairwise = mesh.world_size <= MOST_RANKS
        self._works: list[dist.Work] = []
        # Shape (ranks, length).
        self._messages = _zeros(mesh.world_size if self._pairwise else 1, length)
        if self._pairwise:
            for rank in self._others():
                self._works.append(started(dist.irecv(self._messages[rank], rank, group=self._group, tag=_TAG_PART)))

    def send(self, message: Tensor) -> None:
        """Give this rank's vector (length,); returns at once."""
        if not self._pairwise:
            self._messages[0] = message
            self._works.append(started(dist.all_reduce(self._messages[0], group=self._group, async_op=True)))
            return
        self._messages[self.mesh.rank] = message
        for rank in self._others():
            own = self._messages[self.mesh.rank]
            self._works.append(started(dist.isend(own, rank, group=self._group, tag=_TAG_PART)))

    def finish(self) -> Tensor:
        """Wait for all vectors and return their sum (length,), added in the order of ranks."""
        return _finish(self._works, self._messages).sum(0)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.mesh.world_size) if rank != self.mesh.rank]


def _zeros(*shape: int) -> Tensor:
    # On the host whatever torch's default device is.
    return torch.zeros(shape, dtype=torch.float64, device="cpu")


def _finish(works: list[dist.Work], result: Tensor) -> Tensor:
    for work in works:
        work.wait()
    works.clear()
    return result
