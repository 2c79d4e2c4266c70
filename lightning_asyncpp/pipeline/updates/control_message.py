"""The one control message of a mini-batch: what every rank says in it, and what all know from the sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from lightning_asyncpp.pipeline.ranks.mesh import Mesh
from lightning_asyncpp.pipeline.updates.clipping import gradient_norm

_FIXED = 5


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
