"""How the one control message of a mini-batch is summed where it does not travel along the pipeline.

With one replica it does, behind the gradients (:class:`~lightning_asyncpp.core.updates.mini_batch.MiniBatch`). Replicas
complete in any order: with several of them every rank sends its message to all, or beyond a number of ranks, where that
is too many messages, an all-reduce takes over. So it is on GPUs: hosts are far ahead of them, and along the pipeline
each would wait for the GPUs of all stages behind it, in the middle of a later mini-batch.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_asyncpp.core.ranks.mesh import Mesh, started
from lightning_asyncpp.errors import lost_peers

MOST_RANKS = 16
_TAG = 4


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
        # With one replica the group is that of other collectives, which an all-reduce might meet: ranks start it when
        # each of them has read what it gives.
        shares_group = mesh.groups.control is mesh.groups.host
        self._pairwise = mesh.world_size <= MOST_RANKS or shares_group
        self._works: list[dist.Work] = []
        # Shape (ranks, length).
        rows = mesh.world_size if self._pairwise else 1
        self._messages = torch.zeros((rows, length), dtype=torch.float64, device="cpu")
        if self._pairwise:
            with lost_peers():
                for rank in self._others():
                    row = self._messages[rank]
                    self._works.append(started(dist.irecv(row, rank, group=self._group, tag=_TAG)))

    def send(self, message: Tensor) -> None:
        """Give this rank's vector (length,); returns at once."""
        if not self._pairwise:
            self._messages[0] = message
            with lost_peers():
                self._works.append(started(dist.all_reduce(self._messages[0], group=self._group, async_op=True)))
            return
        own = self._messages[self.mesh.rank]
        own.copy_(message)
        with lost_peers():
            for rank in self._others():
                self._works.append(started(dist.isend(own, rank, group=self._group, tag=_TAG)))

    def finish(self) -> Tensor:
        """Wait for all vectors and return their sum (length,); added replica by replica."""
        with lost_peers():
            for work in self._works:
                work.wait()
        self._works.clear()
        return self._messages.sum(0)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.mesh.world_size) if rank != self.mesh.rank]
