"""How control messages are summed over all ranks: without waiting for anybody who is not needed.

An all-reduce starts when the last rank joins, and takes a round of messages from then on. Here every rank sends its own
message to all others as soon as it has it, so that whoever is last finds the rest already there. Beyond a number of
ranks that is too many messages, and an all-reduce takes over.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_asyncpp.pipeline.mesh import Mesh

MOST_RANKS = 16
_TAG = 4


class ControlExchange:
    """The sum over all ranks of one fp64 vector each.

    Args:
        mesh: this rank's place, connected. Every rank makes its exchanges in the same order.
        length: of the vectors, the same on all ranks.
    """

    def __init__(self, mesh: Mesh, length: int) -> None:
        assert mesh.groups is not None
        self.mesh = mesh
        self._group = mesh.groups.control
        self._pairwise = mesh.world_size <= MOST_RANKS
        self._works: list[dist.Work] = []
        # Shape (ranks, length); receives are posted long before anybody sends.
        self._messages = torch.zeros(mesh.world_size if self._pairwise else 1, length, dtype=torch.float64)
        if self._pairwise:
            for rank in self._others():
                self._keep(dist.irecv(self._messages[rank], rank, group=self._group, tag=_TAG))

    def send(self, message: Tensor) -> None:
        """Give this rank's vector (length,); returns at once."""
        if not self._pairwise:
            self._messages[0] = message
            self._keep(dist.all_reduce(self._messages[0], group=self._group, async_op=True))
            return
        self._messages[self.mesh.rank] = message
        for rank in self._others():
            self._keep(dist.isend(self._messages[self.mesh.rank], rank, group=self._group, tag=_TAG))

    def finish(self) -> Tensor:
        """Wait for all vectors and return their sum (length,), added in the order of ranks."""
        for work in self._works:
            work.wait()
        self._works.clear()
        return self._messages.sum(0)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.mesh.world_size) if rank != self.mesh.rank]

    def _keep(self, work: dist.Work | None) -> None:
        assert work is not None, "this rank is not in the group"
        self._works.append(work)
