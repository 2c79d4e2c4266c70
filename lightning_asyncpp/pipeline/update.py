"""From a complete gradient to what the optimizer needs: reduction over replicas, then the one control message."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad_value_

from lightning_asyncpp.pipeline.buckets import Gradients
from lightning_asyncpp.pipeline.errors import lost_peers
from lightning_asyncpp.pipeline.exchange import ControlSum
from lightning_asyncpp.pipeline.mesh import Mesh
from lightning_asyncpp.pipeline.reduction import Reduction, squares
from lightning_asyncpp.pipeline.ties import TiedGradients

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


def clip_values(parameters: Iterable[Tensor], limit: float) -> None:
    """Limit every element of the gradients that there are: a stage may have none in an update, which torch refuses."""
    if with_gradient := [parameter for parameter in parameters if parameter.grad is not None]:
        clip_grad_value_(with_gradient, limit)


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
        statistics: what this stage's layers counted, in their places among all layers'.
        tied: the sums of gradients that other stages share; None if there are none.
        exchange: of the control messages; None in a world of one rank.
        reduction: over the replicas; None if there is one.
        uses: name -> the gradients of several layers of this stage that share a parameter with another stage's, in the
            order in which they are added; none with several replicas, which add them before they reduce.
    """

    mesh: Mesh
    device: torch.device
    gradients: Gradients
    weight: float
    stop: StopFlags
    payload: Tensor
    statistics: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    tied: TiedGradients | None = None
    exchange: ControlSum | None = None
    reduction: Reduction | None = None
    uses: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    _message: Tensor | None = None
    _squares: float = 0.0

    def launch(self) -> None:
        """Start the reduction over the replicas, or send the control message where nothing is to be waited for first.

        In the middle of a pipeline it waits for shared gradients of stages behind, which were complete before its own:
        the stage before waits for the control message, and this one for activations of that stage.
        """
        if self.reduction is not None:
            self.reduction.send_rest(self.gradients)
            self.gradients = self.reduction.gradients  # the stage's own are not needed any more
            return
        if self.tied is None or not self.mesh.is_first:
            self._launch_message()

    def poll(self) -> bool:
        """Take up what has arrived, and send the control message if that is everything.

        Returns:
            Whether it has been sent.
        """
        if self._message is not None:
            return True
        if not (self.reduction is None or self.reduction.poll()):
            return False
        if self.tied is None or self.tied.have_arrived():
            self._launch_message()
        return self._message is not None

    def reduce_now(self) -> tuple[float, float, Tensor]:
        """Wait for the replicas, not for the other stages; the control message is sent.

        Returns:
            The sum of the weights over the replicas, on a last stage; this stage's sum of squares; and its statistics
            over the replicas.
        """
        if self._message is None:
            self._launch_message()
        weight, statistics = self.weight, self.statistics
        group = self.mesh.groups.data_parallel if self.mesh.groups is not None else None
        if group is not None:
            total = torch.cat([torch.tensor([weight], dtype=torch.float64), statistics]).to(self.device)
            with lost_peers():
                dist.all_reduce(total, group=group)
            weight, statistics = float(total[0]), total[1:].cpu()
        return weight, self._squares, statistics

    def finish(self) -> ControlMessage:
        """Wait for the control message and read it."""
        if self._message is None:
            self._launch_message()
        if self.exchange is not None:
            with lost_peers():
                self._message = self.exchange.finish()
        assert self._message is not None
        if self.tied is not None:
            self.tied.take_whole_sums(self.gradients)
        weight, squares, non_finite, interrupted, finished = self._message[:_FIXED].tolist()
        statistics, payload = self._attached(self._message)
        norm = gradient_norm(squares, weight)
        return ControlMessage(weight, norm, non_finite == 0, int(interrupted), int(finished), payload, statistics)

    def _launch_message(self) -> None:
        if self.reduction is not None:
            self.reduction.wait()
        if self.tied is not None:
            self.tied.pass_on(self.gradients, self.uses)
        self._message = self._compose()
        if self.exchange is not None:
            with lost_peers():
                self.exchange.send(self._message)

    def _compose(self) -> Tensor:
        # Added exactly, so that their order does not matter.
        self._squares = math.fsum(self._each_square())
        finite = math.isfinite(self._squares)
        length = message_length(self.mesh, self.payload, self.statistics.numel())
        message = torch.zeros(length, dtype=torch.float64, device="cpu")
        statistics, payload = self._attached(message)
        statistics.copy_(self.statistics)
        if self.mesh.replica == 0 and finite:  # every replica holds the same reduced gradient
            message[1] = self._squares
        message[2] = float(not finite)
        message[3], message[4] = float(self.stop.interrupted), float(self.stop.finished)
        if self.mesh.is_last:
            message[0] = self.weight
            payload[self.mesh.replica] = self.payload
        return message

    def _each_square(self) -> list[float]:
        """Sum of squares of each gradient that this stage counts."""
        elsewhere = self.tied.counted_elsewhere if self.tied is not None else ()
        counted = {name: g for name, g in self.gradients.items() if name not in elsewhere}
        if self.reduction is None:
            return squares(counted)
        tied = self.tied.names if self.tied is not None else ()
        return self.reduction.squares + squares({name: g for name, g in counted.items() if name in tied})

    def _attached(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """The parts of a message that hold the statistics (length,) and the payloads (replicas, length)."""
        end = _FIXED + self.statistics.numel()
        return message[_FIXED:end], message[end:].view(self.mesh.num_replicas, -1)


def message_length(mesh: Mesh, payload: Tensor, num_statistics: int) -> int:
    """Number of fp64 values in a control message that carries one payload per replica, and statistics."""
    return _FIXED + num_statistics + mesh.num_replicas * payload.numel()
