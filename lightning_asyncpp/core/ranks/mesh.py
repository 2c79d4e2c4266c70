"""The mesh of D replicas x P stages, and the process groups between its ranks.

Rank 0 is the last stage of the first replica: the loss is there first, for the logger and the progress bar. Nobody
else knows how ranks follow each other.
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
"""Seconds for which connections stay open after their last use: messages may still be on their way."""
_retired: list[tuple[float, list[dist.ProcessGroup]]] = []


@dataclass
class Mesh:
    """One rank's place.

    Attributes:
        num_stages: number of stages P.
        num_replicas: number of replicas D.
        rank: this process's rank in the world of D * P processes.
        groups: process groups, made by :meth:`connect`.
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
        """This rank's stage, 0 first."""
        return self.stage_of(self.rank)

    @cached_property
    def is_first(self) -> bool:
        """Whether batches enter here."""
        return self.stage == 0

    @cached_property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.stage == self.num_stages - 1

    def rank_of(self, stage: int, replica: int | None = None) -> int:
        """Rank of a stage, in this rank's replica unless another is named."""
        replica = self.replica if replica is None else replica
        return replica * self.num_stages + self.num_stages - 1 - stage

    def stage_of(self, rank: int) -> int:
        """Stage of a rank."""
        return self.num_stages - 1 - rank % self.num_stages

    def replica_of(self, rank: int) -> int:
        """Index of a rank's replica."""
        return rank // self.num_stages

    def describe(self) -> str:
        """For the log: how many ranks there are of what kind."""
        replicas = f"{self.num_replicas} x " if self.num_replicas > 1 else ""
        return f"{replicas}{self.num_stages} stage{'s' if self.num_stages > 1 else ''}"

    def name_of(self, stage: int) -> str:
        """Return the name in messages of the rank of a stage of this replica."""
        return f"rank {self.rank_of(stage)} (stage {stage})"

    def send(self, copy: HostCopy, rank: int, tag: int) -> HostWork:
        """Send what is on the host, or on its way there, to a rank, in the background."""
        assert self.groups is not None
        group = self.groups.host
        if not copy.is_done():
            return HostWork(lambda: started(dist.isend(copy.wait(), rank, group=group, tag=tag)))
        return HostWork(started(dist.isend(copy.tensor, rank, group=group, tag=tag)))

    def receive(self, tensor: Tensor, rank: int, tag: int) -> HostWork:
        """Start to receive host data from a rank into ``tensor``, in the background."""
        assert self.groups is not None
        return HostWork(started(dist.irecv(tensor, rank, group=self.groups.host, tag=tag)))

    def connect(
        self,
        timeout: timedelta | None = None,
        direct: bool | None = None,
        agree: Callable[[dist.ProcessGroup], None] = lambda group: None,
    ) -> None:
        """Make every process group up front, in the same order on every rank; a collective call.

        Args:
            timeout: of blocking communication in them; default: torch's.
            direct: whether tensors travel between neighbours by such groups; default: unless the backend is gloo.
            agree: is called with the first group, of all ranks: which others there are goes by settings, in which ranks
                may differ.

        The groups between neighbours, for tensors on devices, are made per direction: two ranks that share one
        communicator for both directions can each wait for the other's receive.
        """
        if self.world_size == 1 or self.groups is not None:
            return
        destroy_retired()
        # Headers, control messages and checks are host data whatever the device is.
        host = new_group(timeout, backend="gloo")
        agree(host)
        # Each group on gloo keeps a thread that wakes a hundred times a second. Only replicas may need the second
        # one: an all-reduce of control messages may still run when another collective starts.
        groups = Groups(control=host if self.num_replicas == 1 else new_group(timeout, backend="gloo"), host=host)
        if direct if direct is not None else dist.get_backend() != "gloo":
            self._connect_neighbours(groups, timeout)
        groups.data_parallel = disjoint_groups([self._stage_ranks(s) for s in range(self.num_stages)], timeout)
        groups.last_stages = disjoint_groups([self._stage_ranks(self.num_stages - 1)], timeout)
        self.groups = groups
        weakref.finalize(groups, _retire, groups.on_host())

    def group_for_saving(self, timeout: timedelta | None = None) -> dist.ProcessGroup | None:
        """A group of all ranks for a thread that writes checkpoints; a collective call the first time.

        Args:
            timeout: of blocking communication in it; default: torch's.
        """
        if self.groups is not None and self.groups.saving is None:
            self.groups.saving = new_group(timeout, backend="gloo")
            weakref.finalize(self.groups, _retire, [self.groups.saving])
        return None if self.groups is None else self.groups.saving

    def _connect_neighbours(self, groups: Groups, timeout: timedelta | None) -> None:
        """Groups of two for each direction: first the pairs that begin with an even stage, then the others."""
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
                groups.forward, groups.backward = there, back

    def _stage_ranks(self, stage: int) -> list[int]:
        return [self.rank_of(stage, replica) for replica in range(self.num_replicas)]


@dataclass
class Groups:
    """Process groups of a rank.

    Attributes:
        control: all ranks, for the one control message per mini-batch; with one replica the same as ``host``.
        host: all ranks, for host data between any two of them.
        forward: tensors on devices from the stage before.
        backward: their gradients to the stage before.
        to_next: tensors on devices to the stage after.
        from_next: their gradients from the stage after.
        data_parallel: the ranks of this stage in all replicas; None with one replica.
        last_stages: the last stages of all replicas; None with one replica or off the last stage.
        saving: all ranks, for a thread that writes checkpoints; None until there is one.
    """

    control: dist.ProcessGroup
    host: dist.ProcessGroup
    forward: dist.ProcessGroup | None = None
    backward: dist.ProcessGroup | None = None
    to_next: dist.ProcessGroup | None = None
    from_next: dist.ProcessGroup | None = None
    data_parallel: dist.ProcessGroup | None = None
    last_stages: dist.ProcessGroup | None = None
    saving: dist.ProcessGroup | None = None

    def on_host(self) -> list[dist.ProcessGroup]:
        """The groups on gloo that this rank is in, each once."""
        groups = [self.host, self.control, self.data_parallel, self.last_stages, self.saving]
        distinct = {id(group): group for group in groups if group is not None}
        return [group for group in distinct.values() if dist.get_backend(group) == "gloo"]

    def on_devices(self) -> list[dist.ProcessGroup]:
        """The groups on NCCL that this rank is in."""
        groups = [self.forward, self.backward, self.to_next, self.from_next, self.data_parallel, self.last_stages]
        return [group for group in groups if group is not None and dist.get_backend(group) == "nccl"]


def _retire(groups: list[dist.ProcessGroup]) -> None:
    """Put groups on gloo that nothing here uses any more on the list of those to destroy.

    Not those on NCCL: ranks come here when they collect their garbage, and its communicators end together.
    """
    _retired.append((time.monotonic(), groups))


def destroy_retired(grace: float = GRACE_SECONDS) -> None:
    """Let go of groups that nothing uses any more; torch keeps them, with their threads, until it is told to.

    Args:
        grace: seconds since their last use here. Other ranks may be slower, and still read what was sent to them: a
            connection that is closed at once may lose it.
    """
    while _retired and time.monotonic() - _retired[0][0] >= grace:
        for group in _retired.pop(0)[1]:
            with suppress(ValueError, AssertionError):  # somebody destroyed all groups
                dist.destroy_process_group(group)


def started(work: dist.Work | None) -> dist.Work:
    """The work of an asynchronous call in a group that this rank is in; torch returns None to ranks outside."""
    assert work is not None, "this rank is not in the group"
    return work
