"""Mesh of D replicas x P stages, and its process groups.

Rank 0 is the last stage of the first replica, because the logger and the progress bar need the loss. No other module
defines the order of ranks.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch.distributed as dist
from torch import Tensor

from lightning_asyncpp.core.host_copies import HostCopy
from lightning_asyncpp.core.ranks.process_groups import HostWork, disjoint_groups, neighbour_options, new_group

GRACE_SECONDS = 5.0
"""Seconds for which connections stay open after their last use, since messages may still be under way."""
_retired: list[tuple[float, list[dist.ProcessGroup]]] = []


@dataclass
class Mesh:
    """Mesh of ranks, as seen by one of them.

    Attributes:
        num_stages: number of stages P.
        num_replicas: number of replicas D.
        rank: this process's rank in the world of D * P processes.
        groups: process groups, created by :meth:`connect`.
    """

    num_stages: int
    num_replicas: int
    rank: int
    groups: Groups | None = None

    @cached_property
    def world_size(self) -> int:
        """Number of processes."""
        return self.num_stages * self.num_replicas

    @cached_property
    def replica(self) -> int:
        """Index of this rank's replica."""
        return self.replica_of(self.rank)

    @cached_property
    def stage(self) -> int:
        """Index of this rank's stage."""
        return self.stage_of(self.rank)

    @cached_property
    def is_first(self) -> bool:
        """Whether this rank is the first stage, where batches enter."""
        return self.stage == 0

    @cached_property
    def is_last(self) -> bool:
        """Whether this rank is the last stage, which computes the loss."""
        return self.stage == self.num_stages - 1

    def rank_of(self, stage: int, replica: int | None = None) -> int:
        """Return the rank of a stage, by default in this rank's replica."""
        replica = self.replica if replica is None else replica
        return replica * self.num_stages + self.num_stages - 1 - stage

    def stage_of(self, rank: int) -> int:
        """Return the stage of a rank."""
        return self.num_stages - 1 - rank % self.num_stages

    def replica_of(self, rank: int) -> int:
        """Return the replica of a rank."""
        return rank // self.num_stages

    def describe(self) -> str:
        """Return the numbers of replicas and stages, for the log."""
        replicas = f"{self.num_replicas} x " if self.num_replicas > 1 else ""
        return f"{replicas}{self.num_stages} stage{'s' if self.num_stages > 1 else ''}"

    def name_of(self, rank: int) -> str:
        """Return the name of a rank, for messages."""
        return f"rank {rank} (stage {self.stage_of(rank)})"

    def send(self, copy: HostCopy, rank: int, tag: int) -> HostWork:
        """Send a host copy to a rank, in the background; the copy need not be complete yet."""
        assert self.groups is not None
        group = self.groups.host
        if not copy.is_done():
            return HostWork(lambda: started(dist.isend(copy.wait(), rank, group=group, tag=tag)))
        return HostWork(started(dist.isend(copy.tensor, rank, group=group, tag=tag)))

    def receive(self, tensor: Tensor, rank: int, tag: int) -> HostWork:
        """Receive host data from a rank into ``tensor``, in the background."""
        assert self.groups is not None
        return HostWork(started(dist.irecv(tensor, rank, group=self.groups.host, tag=tag)))

    def connect(
        self,
        timeout: timedelta | None = None,
        direct: bool | None = None,
        agree: Callable[[dist.ProcessGroup], None] = lambda group: None,
    ) -> None:
        """Create all process groups, in the same order on every rank; a collective call.

        Neighbours have one group per direction for tensors on devices: with one communicator for both directions, each
        rank could wait for the other's receive.

        Args:
            timeout: timeout of blocking communication; default: torch's.
            direct: whether neighbours exchange tensors through such groups; default: yes unless the backend is gloo.
            agree: function called with the group of all ranks, before further groups are created. It must compare the
                settings, which determine the further groups.
        """
        if self.world_size == 1 or self.groups is not None:
            return
        destroy_retired()
        # gloo also for GPUs: checks, control messages (sums over ranks) and sums of shared gradients are host data.
        host = new_group(timeout, backend="gloo")
        agree(host)
        # Each gloo group has a thread that wakes a hundred times a second, so there are few groups. With replicas,
        # control messages have a separate group, as their all-reduce may still run when another collective starts.
        groups = Groups(control=host if self.num_replicas == 1 else new_group(timeout, backend="gloo"), host=host)
        if direct if direct is not None else dist.get_backend() != "gloo":
            self._connect_neighbours(groups, timeout)
        groups.data_parallel = disjoint_groups([self._stage_ranks(s) for s in range(self.num_stages)], timeout)
        groups.last_stages = disjoint_groups([self._stage_ranks(self.num_stages - 1)], timeout)
        self.groups = groups
        weakref.finalize(groups, _retire, groups.on_host())

    def group_for_saving(self, timeout: timedelta | None = None) -> dist.ProcessGroup | None:
        """Return a group of all ranks for the thread that writes checkpoints; the first call is a collective.

        Args:
            timeout: timeout of blocking communication; default: torch's.
        """
        if self.groups is not None and self.groups.saving is None:
            self.groups.saving = new_group(timeout, backend="gloo")
            weakref.finalize(self.groups, _retire, [self.groups.saving])
        return None if self.groups is None else self.groups.saving

    def _connect_neighbours(self, groups: Groups, timeout: timedelta | None) -> None:
        """Create groups of two for each direction, first for pairs that begin with an even stage, then for the rest."""
        for parity in (0, 1):
            pairs = [
                [self.rank_of(stage, replica), self.rank_of(stage + 1, replica)]
                for replica in range(self.num_replicas)
                for stage in range(parity, self.num_stages - 1, 2)
            ]
            there, back = (
                disjoint_groups(pairs, timeout, neighbour_options),
                disjoint_groups(pairs, timeout, neighbour_options),
            )
            if self.stage % 2 == parity:
                groups.to_next, groups.from_next = there, back
            else:
                groups.from_prev, groups.to_prev = there, back

    def _stage_ranks(self, stage: int) -> list[int]:
        return [self.rank_of(stage, replica) for replica in range(self.num_replicas)]


@dataclass
class Groups:
    """Process groups of a rank.

    Attributes:
        control: all ranks, for control messages (:class:`.ExchangeSum`); with one replica the same as ``host``.
        host: all ranks, for host data between any two of them.
        from_prev: activations on devices, from the previous stage.
        to_prev: gradients of these activations, to the previous stage.
        to_next: activations on devices, to the next stage.
        from_next: gradients of these activations, from the next stage.
        data_parallel: ranks of this stage in all replicas; None with one replica.
        last_stages: last stages of all replicas; None with one replica, and on all earlier stages.
        saving: all ranks, for the thread that writes checkpoints; None until its first use.
    """

    control: dist.ProcessGroup
    host: dist.ProcessGroup
    from_prev: dist.ProcessGroup | None = None
    to_prev: dist.ProcessGroup | None = None
    to_next: dist.ProcessGroup | None = None
    from_next: dist.ProcessGroup | None = None
    data_parallel: dist.ProcessGroup | None = None
    last_stages: dist.ProcessGroup | None = None
    saving: dist.ProcessGroup | None = None

    def on_host(self) -> list[dist.ProcessGroup]:
        """Return this rank's gloo groups, each once."""
        groups = [self.host, self.control, self.data_parallel, self.last_stages, self.saving]
        distinct = {id(group): group for group in groups if group is not None}
        return [group for group in distinct.values() if "gloo" in dist.get_backend_config(group)]

    def on_devices(self) -> list[dist.ProcessGroup]:
        """Return this rank's NCCL groups."""
        groups = [self.from_prev, self.to_prev, self.to_next, self.from_next, self.data_parallel, self.last_stages]
        return [group for group in groups if group is not None and "nccl" in dist.get_backend_config(group)]


def _retire(groups: list[dist.ProcessGroup]) -> None:
    """Schedule unused gloo groups for destruction.

    NCCL groups are left out: their destruction is collective, but ranks collect garbage at different times.
    """
    _retired.append((time.monotonic(), groups))


def destroy_retired(grace: float = GRACE_SECONDS) -> None:
    """Destroy unused groups, since torch would keep the groups and their threads.

    Args:
        grace: seconds that must have passed since the groups' last use on this rank. Slower ranks may still read
            messages, which could be lost if connections were closed earlier.
    """
    while _retired and time.monotonic() - _retired[0][0] >= grace:
        for group in _retired.pop(0)[1]:
            with suppress(ValueError, AssertionError):  # all groups have been destroyed
                dist.destroy_process_group(group)


def started(work: dist.Work | None) -> dist.Work:
    """Return the work of an asynchronous call; torch's type includes None, for ranks outside of the group."""
    assert work is not None, "this rank is not in the group"
    return work
