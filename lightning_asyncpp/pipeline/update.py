"""From a complete gradient to what the optimizer needs: reduction over replicas, then the one control message."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_asyncpp.pipeline.buckets import Gradients
from lightning_asyncpp.pipeline.errors import lost_peers
from lightning_asyncpp.pipeline.exchange import ControlSum
from lightning_asyncpp.pipeline.mesh import Mesh
from lightning_asyncpp.pipeline.reduction import Reduction, squares

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
    """

    weight: float
    norm: float
    finite: bool
    interrupted: int
    finished: int
    payload: Tensor


@dataclass
class StopFlags:
    """What this rank asks of all; carried by the next control message.

    Attributes:
        interrupted: the process was told to end.
        finished: somebody decided that training is done.
    """

    interrupted: bool = False
    finished: bool = False


def gradient_norm(sum_of_squares: float, weight: float) -> float:
    """Norm of the mean gradient from the squares of the summed one, rounded to fp32.

    Rounding hides the last bits of the fp64 sum, whose order depends on the number of stages.
    """
    norm = math.sqrt(sum_of_squares) / weight if weight else 0.0
    return float(torch.tensor(norm, dtype=torch.float32))


def clip_coefficient(norm: float, max_norm: float) -> float:
    """Factor of ``torch.nn.utils.clip_grad_norm_`` for a gradient of norm ``norm``."""
    return min(1.0, max_norm / (norm + 1e-6))


@dataclass
class PendingUpdate:
    """A complete gradient on its way to the optimizer: nothing here blocks until :meth:`finish`.

    Attributes:
        mesh: this rank's place.
        device: of the gradients.
        gradients: name -> summed gradient of this stage; replaced by the sum over the replicas.
        weight: sum of the micro-batches' weights; counted on the last stages only.
        stop: what this rank asks for.
        payload: this replica's attachment, of the same length on all ranks; counted on the last stages only.
        exchange: of the control messages; None in a world of one rank.
        reduction: over the replicas; None if there is one.
    """

    mesh: Mesh
    device: torch.device
    gradients: Gradients
    weight: float
    stop: StopFlags
    payload: Tensor
    exchange: ControlSum | None = None
    reduction: Reduction | None = None
    _message: Tensor | None = None
    _squares: float = 0.0

    def launch(self) -> None:
        """Start the reduction over the replicas, or with one replica the control message."""
        if self.reduction is None:
            self._launch_message()
            return
        self.reduction.send_rest(self.gradients)
        self.gradients = self.reduction.gradients  # the stage's own are not needed any more

    def poll(self) -> None:
        """Take up what the reduction brought, and send the control message if that is everything."""
        if self._message is None and (self.reduction is None or self.reduction.poll()):
            self._launch_message()

    def reduce_now(self) -> tuple[float, float]:
        """Wait for the replicas, not for the other stages; the control message is sent.

        Returns:
            The sum of the weights over the replicas, on a last stage, and this stage's sum of squares.
        """
        if self._message is None:
            self._launch_message()
        weight = self.weight
        group = self.mesh.groups.data_parallel if self.mesh.groups is not None else None
        if group is not None:
            total = torch.tensor([weight], dtype=torch.float64, device=self.device)
            with lost_peers():
                dist.all_reduce(total, group=group)
            weight = float(total)
        return weight, self._squares

    def finish(self) -> ControlMessage:
        """Wait for the control message and read it."""
        if self._message is None:
            self._launch_message()
        if self.exchange is not None:
            with lost_peers():
                self._message = self.exchange.finish()
        assert self._message is not None
        weight, squares, non_finite, interrupted, finished = self._message[:_FIXED].tolist()
        payload = self._message[_FIXED:].view(self.mesh.num_replicas, -1)
        norm = gradient_norm(squares, weight)
        return ControlMessage(weight, norm, non_finite == 0, int(interrupted), int(finished), payload)

    def _launch_message(self) -> None:
        if self.reduction is not None:
            self.reduction.wait()
        self._message = self._compose()
        if self.exchange is not None:
            with lost_peers():
                self.exchange.send(self._message)

    def _compose(self) -> Tensor:
        each = squares(self.gradients) if self.reduction is None else self.reduction.squares
        # Added exactly, so that their order does not matter.
        self._squares = math.fsum(each)
        finite = math.isfinite(self._squares)
        message = torch.zeros(message_length(self.mesh, self.payload), dtype=torch.float64, device="cpu")
        if self.mesh.replica == 0 and finite:  # every replica holds the same reduced gradient
            message[1] = self._squares
        message[2] = float(not finite)
        message[3], message[4] = float(self.stop.interrupted), float(self.stop.finished)
        if self.mesh.is_last:
            message[0] = self.weight
            message[_FIXED:].view(self.mesh.num_replicas, -1)[self.mesh.replica] = self.payload
        return message


def message_length(mesh: Mesh, payload: Tensor) -> int:
    """Number of fp64 values in a control message that carries one payload per replica."""
    return _FIXED + mesh.num_replicas * payload.numel()
