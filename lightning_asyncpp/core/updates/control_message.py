"""The one control message of a mini-batch: what every rank says, what all know, and how it is summed over the ranks.

An all-reduce starts when the last rank joins, and takes a round of messages from then on. But gradients complete stage
by stage, from the last to the first. So with one replica the messages are summed along that way, behind the gradients;
the first stage, which comes last, finds the rest already there, and its sum travels to the others in front of the
activations that need it (:class:`ControlChain`): no stage sends more messages in a longer pipeline. Replicas complete
in any order: with several of them every rank sends its message to all (:class:`ControlExchange`), or beyond a number
of ranks, where that is too many messages, an all-reduce takes over. So it is on GPUs: hosts are far ahead of them, and
in the chain each would wait for the GPUs of all stages behind it, in the middle of a later mini-batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_asyncpp.core.ranks.mesh import Mesh, started
from lightning_asyncpp.core.updates.clipping import gradient_norm
from lightning_asyncpp.core.wire.transport import Transport

MOST_RANKS = 16
_TAG = 4
_FIXED = 5  # numbers of a message, before what layers counted


@dataclass(frozen=True)
class ControlMessage:
    """What all ranks agree on about a mini-batch, from one asynchronous exchange.

    Attributes:
        weight: sum of the micro-batches' weights over the mini-batch and the replicas.
        norm: 2-norm of the whole gradient over all stages, after division by ``weight``; fp64 sums, rounded to fp32.
        finite: whether every element of the gradient is.
        interrupted: number of ranks that were told to end (SIGTERM).
        finished: number of ranks that want training to stop early.
        payload: what each replica's last stage attached, shape (replicas, length), fp64.
        statistics: what layers counted, over all stages and replicas, (layout's length,) fp64.
    """

    weight: float
    norm: float
    finite: bool
    interrupted: int
    finished: int
    payload: Tensor
    statistics: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))


class LatePayload(Protocol):
    """What a last stage attaches to a control message, while it is still on its way from the device.

    Attributes:
        length: how many numbers it will be.
    """

    length: int

    def is_there(self) -> bool:
        """Whether :meth:`get` need not wait."""

    def get(self) -> Tensor:
        """The numbers, (length,) fp64 on the host; waits for the device."""


Payload = Tensor | LatePayload


@dataclass
class StopFlags:
    """What this rank asks of all; carried by the next control message.

    Attributes:
        interrupted: the process was told to end.
        finished: somebody decided that training is done.
    """

    interrupted: bool = False
    finished: bool = False


class MessageLayout:
    """A control message as an fp64 vector: every rank writes one, all are summed, and every rank reads the sum.

    It holds five numbers, what layers counted, and the payload of each replica.

    Args:
        mesh: this rank's place.
        num_statistics: how many numbers the counts of all layers are.
        payload: what this rank attaches, of the same length on all ranks.

    Attributes:
        length: of the vector.
    """

    def __init__(self, mesh: Mesh, num_statistics: int, payload: Payload) -> None:
        self._mesh, self._payloads_at = mesh, _FIXED + num_statistics
        payload_length = payload.numel() if isinstance(payload, Tensor) else payload.length
        self.length = self._payloads_at + mesh.num_replicas * payload_length

    def write(
        self, weight: float, squares: float, counts: Sequence[float], stop: StopFlags, payload: Payload
    ) -> Tensor:
        """This rank's vector; waits for a payload that is still on its way.

        Args:
            weight: sum of the micro-batches' weights; that of last stages counts.
            squares: sum of squares of this stage's gradient, the same on all replicas.
            counts: what this stage's layers counted, in their places among all layers'; empty if none does.
            stop: what this rank asks for.
            payload: what is attached; that of last stages counts.
        """
        mesh, finite = self._mesh, math.isfinite(squares)
        vector = torch.zeros(self.length, dtype=torch.float64, device="cpu")
        if counts:
            self.statistics(vector).copy_(torch.tensor(counts, dtype=torch.float64))
        if mesh.replica == 0 and finite:  # every replica holds the same reduced gradient
            vector[1] = squares
        vector[2] = float(not finite)
        vector[3], vector[4] = float(stop.interrupted), float(stop.finished)
        if mesh.is_last:
            vector[0] = weight
            self._payloads(vector)[mesh.replica] = payload if isinstance(payload, Tensor) else payload.get()
        return vector

    def read(self, total: Tensor) -> ControlMessage:
        """What the sum of all ranks' vectors says."""
        weight, squares, non_finite, interrupted, finished = total[:_FIXED].tolist()
        norm, payloads, statistics = gradient_norm(squares, weight), self._payloads(total), self.statistics(total)
        return ControlMessage(weight, norm, non_finite == 0, int(interrupted), int(finished), payloads, statistics)

    def statistics(self, vector: Tensor) -> Tensor:
        """The part of a vector that holds what layers counted."""
        return vector[_FIXED : self._payloads_at]

    def _payloads(self, vector: Tensor) -> Tensor:
        return vector[self._payloads_at :].view(self._mesh.num_replicas, -1)


class ControlSum(Protocol):
    """The sum over all ranks of one fp64 vector each; every rank makes its sums in the same order."""

    def send(self, message: Tensor) -> None:
        """Give this rank's vector (length,)."""

    def finish(self) -> Tensor:
        """Wait for the sum (length,)."""


def control_sum(
    mesh: Mesh, transport: Transport | None, mini_batch: int, length: int, late: bool = False
) -> ControlSum:
    """Start a sum of vectors of ``length`` elements for a mini-batch, before anybody sends.

    Args:
        mesh: this rank's place.
        transport: messages with the neighbours; None in a single stage.
        mini_batch: t.
        length: of the vectors.
        late: whether ranks read what they give from a GPU, and send it when it has come; the same on all ranks.
    """
    if mesh.num_replicas > 1 or late:
        return ControlExchange(mesh, length)
    assert transport is not None, "one replica of one stage has nothing to sum"
    return ControlChain(mesh, transport, mini_batch, length)


class ControlChain:
    """Sums along the way of the gradients, from the last stage to the first; the sum goes back through all stages.

    Args:
        mesh: this rank's place; one replica.
        transport: messages with the neighbours.
        mini_batch: t, which its messages carry.
        length: of the vectors, the same on all ranks.
    """

    def __init__(self, mesh: Mesh, transport: Transport, mini_batch: int, length: int) -> None:
        self.mesh, self.transport, self.mini_batch, self.length = mesh, transport, mini_batch, length
        self._total: Tensor | None = None

    def can_send(self) -> bool:
        """Whether :meth:`send` finds the sum of the stages behind, or may wait for it."""
        return self.mesh.is_last or self.transport.has_part(self.mini_batch)

    def send(self, message: Tensor) -> None:
        """Add this rank's vector (length,) to those of the stages behind; their gradients were complete before.

        Theirs follows the last gradient that came from there, so it is there or about to be: it is waited for.
        """
        if not self.mesh.is_last:
            message = self.transport.receive_part(self.mini_batch, self.length) + message
        if not self.mesh.is_first:
            self.transport.send_part(self.mini_batch, message)
            return
        self._total = message
        self.transport.send_total(self.mini_batch, message)

    def finish(self) -> Tensor:
        """Wait for the sum (length,), added from the last stage to the first."""
        if self._total is None:
            self._total = self.transport.receive_total(self.mini_batch, self.length)
        return self._total


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
            for rank in self._others():
                row = self._messages[rank]
                self._works.append(started(dist.irecv(row, rank, group=self._group, tag=_TAG)))

    def send(self, message: Tensor) -> None:
        """Give this rank's vector (length,); returns at once."""
        if not self._pairwise:
            self._messages[0] = message
            self._works.append(started(dist.all_reduce(self._messages[0], group=self._group, async_op=True)))
            return
        own = self._messages[self.mesh.rank]
        own.copy_(message)
        for rank in self._others():
            self._works.append(started(dist.isend(own, rank, group=self._group, tag=_TAG)))

    def finish(self) -> Tensor:
        """Wait for all vectors and return their sum (length,); added replica by replica."""
        for work in self._works:
            work.wait()
        self._works.clear()
        return self._messages.sum(0)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.mesh.world_size) if rank != self.mesh.rank]
