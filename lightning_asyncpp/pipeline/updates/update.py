"""From a complete gradient to what the optimizer needs: reduction over replicas, then the one control message."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad_value_

from lightning_asyncpp.pipeline import foreach
from lightning_asyncpp.pipeline.errors import lost_peers
from lightning_asyncpp.pipeline.ranks.mesh import Mesh
from lightning_asyncpp.pipeline.updates.buckets import Gradients
from lightning_asyncpp.pipeline.updates.exchange import ControlSum
from lightning_asyncpp.pipeline.updates.reduction import Reduction
from lightning_asyncpp.pipeline.updates.tied_gradients import TiedGradients
from lightning_asyncpp.pipeline.wire.reading import Reading

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
        statistics: what this stage's layers counted, in their places among all layers'; where they counted it.
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
    payload: Payload
    statistics: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    tied: TiedGradients | None = None
    exchange: ControlSum | None = None
    reduction: Reduction | None = None
    uses: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    _message: Tensor | None = None
    _squares: float = 0.0
    _norms: Reading | None = None
    _counts: Reading = field(init=False)

    def __post_init__(self) -> None:
        self._counts = Reading([self.statistics])

    def launch(self) -> None:
        """Start the reduction over the replicas, or begin to read what the control message is to say.

        Messages leave in :meth:`poll`, in the order of the mini-batches.

        In the middle of a pipeline it waits for shared gradients of stages behind, which were complete before its own:
        the stage before waits for the control message, and this one for activations of that stage.
        """
        if self.reduction is not None:
            self.reduction.send_rest(self.gradients)
            self.gradients = self.reduction.gradients  # the stage's own are not needed any more
            return
        if self.tied is None or not self.mesh.is_first:
            self._read_norms()

    def poll(self) -> bool:
        """Take up what has arrived, and send the control message if that is everything.

        Returns:
            Whether it has been sent.
        """
        if self._message is not None:
            return True
        if self._norms is None:
            if not (self.reduction is None or self.reduction.poll()):
                return False
            if not (self.tied is None or self.tied.have_arrived()):
                return False
            self._read_norms()
        if self._is_known():
            self._send_message()
        return self._message is not None

    def reduce_now(self) -> tuple[float, float, Tensor]:
        """Wait for the replicas, not for the other stages; the control message is sent.

        Returns:
            The sum of the weights over the replicas, on a last stage; this stage's sum of squares; and its statistics
            over the replicas.
        """
        self._send_message()
        assert self._message is not None
        weight, statistics = self.weight, self._attached(self._message)[0]
        group = self.mesh.groups.data_parallel if self.mesh.groups is not None else None
        if group is not None:
            own = torch.tensor([weight], dtype=torch.float64)
            total = torch.cat([own, statistics]).to(self.device, non_blocking=True)
            with lost_peers():
                dist.all_reduce(total, group=group)
            total = total.cpu()
            weight, statistics = float(total[0]), total[1:]
        return weight, self._squares, statistics

    def finish(self) -> ControlMessage:
        """Wait for the control message and read it."""
        self._send_message()
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

    def _read_norms(self) -> None:
        """Begin to read what of this stage's gradient the host must know: all that is not in the reduction's norms."""
        if self.tied is not None:
            self.tied.pass_on(self.gradients, self.uses)
        elsewhere = self.tied.counted_elsewhere if self.tied is not None else ()
        tied = self.tied.names if self.tied is not None else ()
        counted = [
            gradient
            for name, gradient in self.gradients.items()
            if gradient is not None and name not in elsewhere and (self.reduction is None or name in tied)
        ]
        self._norms = Reading([foreach.norms(counted, torch.float64)])

    def _is_known(self) -> bool:
        """Whether the device has got to everything that the message holds."""
        payload = True if isinstance(self.payload, Tensor) else self.payload.is_there()
        return payload and self._norms is not None and self._norms.is_there() and self._counts.is_there()

    def _send_message(self) -> None:
        """Send the control message unless it has been sent; waits for the device, once."""
        if self._message is not None:
            return
        if self._norms is None:
            if self.reduction is not None:
                self.reduction.wait()
            self._read_norms()
        self._message = self._compose()
        if self.exchange is not None:
            with lost_peers():
                self.exchange.send(self._message)

    def _compose(self) -> Tensor:
        assert self._norms is not None
        # The newest reading first: what was asked for before it is there when it is. Added exactly, so that the order
        # of the squares does not matter.
        (norms,) = self._norms.get()
        reduced = self.reduction.squares if self.reduction is not None else []
        self._squares = math.fsum([*reduced, *(norm * norm for norm in norms)])
        finite = math.isfinite(self._squares)
        length = message_length(self.mesh, self.payload, self.statistics.numel())
        message = torch.zeros(length, dtype=torch.float64, device="cpu")
        statistics, payload = self._attached(message)
        if counts := self._counts.get()[0]:
            statistics.copy_(torch.tensor(counts, dtype=torch.float64))
        if self.mesh.replica == 0 and finite:  # every replica holds the same reduced gradient
            message[1] = self._squares
        message[2] = float(not finite)
        message[3], message[4] = float(self.stop.interrupted), float(self.stop.finished)
        if self.mesh.is_last:
            message[0] = self.weight
            payload[self.mesh.replica] = self.payload if isinstance(self.payload, Tensor) else self.payload.get()
        return message

    def _attached(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """The parts of a message that hold the statistics (length,) and the payloads (replicas, length)."""
        end = _FIXED + self.statistics.numel()
        return message[_FIXED:end], message[end:].view(self.mesh.num_replicas, -1)


def message_length(mesh: Mesh, payload: Payload, num_statistics: int) -> int:
    """Number of fp64 values in a control message that carries one payload per replica, and statistics."""
    length = payload.numel() if isinstance(payload, Tensor) else payload.length
    return _FIXED + num_statistics + mesh.num_replicas * length
