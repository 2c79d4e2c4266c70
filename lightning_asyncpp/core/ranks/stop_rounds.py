"""How all ranks learn in an evaluation, where no control message travels, that one of them was told to end.

After every batch each rank gives its flag to an asynchronous sum over all ranks, and reads the sum of a few batches
before: all ranks read the same one after the same batch, so all of them stop there. Replicas may have different numbers
of batches: who is done with a loader keeps on giving flags until all are.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_asyncpp.core.ranks.mesh import Mesh, started
from lightning_asyncpp.errors import lost_peers


def batches_behind(num_stages: int, micro_batches: int) -> int:
    """How many batches later a sum is read: so late that no stage waits for those behind it, which lag by nature."""
    return 2 + (num_stages - 1) // micro_batches


class StopRounds:
    """The sums of flags of one rank; every rank makes its calls in the same order.

    Args:
        mesh: this rank's place.
        behind: number of batches after which a sum is read.
    """

    def __init__(self, mesh: Mesh, behind: int) -> None:
        self.mesh, self.behind = mesh, behind
        self._pending: deque[tuple[dist.Work | None, Tensor]] = deque()
        self._read = 0

    def after_batch(self, stop: bool) -> bool:
        """Give this rank's flag after a batch.

        Args:
            stop: whether this rank was told to end.

        Returns:
            Whether all ranks end after this batch: some rank was told to, ``behind`` batches ago.

        Raises:
            PeerLostError: a rank is gone.
        """
        self._give(stop, running=True)
        if len(self._pending) <= self.behind:
            return False
        agreed = self._take()[0]
        if agreed:
            self._finish_with(len(self._pending))
        return agreed

    def finish(self, stop: bool) -> bool:
        """Read what is outstanding, after the last batch of this rank; waits for those with more batches.

        Args:
            stop: whether this rank was told to end.

        Returns:
            Whether all ranks end here: some rank was told to.

        Raises:
            PeerLostError: a rank is gone.
        """
        last: int | None = None
        while True:
            if not self._pending:
                self._give(stop, running=False)
            agreed, running = self._take()
            if agreed and last is None:
                last = self._read + self.behind  # where those with more batches stop
            if not running or self._read == last:
                self._finish_with(0)
                return last is not None

    def _give(self, stop: bool, running: bool) -> None:
        flags = torch.tensor([stop, running], dtype=torch.float64, device="cpu")
        work = None
        if self.mesh.groups is not None:
            with lost_peers():
                work = started(dist.all_reduce(flags, group=self.mesh.groups.host, async_op=True))
        self._pending.append((work, flags))

    def _take(self) -> tuple[bool, bool]:
        """Whether any rank was told to end, and whether any has more batches, as of the oldest sum not read yet."""
        work, flags = self._pending.popleft()
        if work is not None:
            with lost_peers():
                work.wait()
        self._read += 1
        stop, running = flags.tolist()
        return stop > 0, running > 0

    def _finish_with(self, outstanding: int) -> None:
        for _ in range(outstanding):
            self._take()
        self._read = 0
