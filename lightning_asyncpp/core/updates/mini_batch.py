"""A mini-batch from its first forward to its update: sums over replicas, then the one control message.

An all-reduce starts when the last rank joins, and takes a round of messages from then on. But gradients complete stage
by stage, from the last to the first. So with one replica control messages are summed along that way, behind the
gradients; the first stage, which comes last, finds the rest already there, and its sum travels to the others in front
of the activations that need it: no stage sends more messages in a longer pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_asyncpp.auxiliary import Collected
from lightning_asyncpp.core.clipping import gradient_norm, norms_of
from lightning_asyncpp.core.host_copies import Reading
from lightning_asyncpp.core.ranks.agreement import ControlExchange
from lightning_asyncpp.core.ranks.mesh import Mesh, started
from lightning_asyncpp.core.trace import Moment
from lightning_asyncpp.core.updates.reduction import Gradients, Reduction, TiedGradients
from lightning_asyncpp.core.wire.transport import Transport
from lightning_asyncpp.errors import lost_peers

HyperParameters = list[dict[str, Any]]
"""Of every group of an optimizer, without its parameters."""
_FIXED = 5  # numbers of a message, before what layers counted


@dataclass(frozen=True)
class ControlMessage:
    """Quantities of a mini-batch that all ranks agree on, from one asynchronous exchange.

    Attributes:
        weight: sum of the microbatches' weights over the mini-batch and the replicas.
        norm: 2-norm of the whole gradient over all stages, after division by ``weight``; fp64 sums, rounded to fp32.
            Gradients are clipped by it. Where this stage steps ahead, it is that of the mini-batch before.
        finite: whether every element of the gradient is.
        interrupted: number of ranks that were told to end (SIGTERM).
        finished: number of ranks that want training to stop early.
        statistics: what layers counted, over all stages and replicas, (layout's length,) fp64.
    """

    weight: float
    norm: float
    finite: bool
    interrupted: int
    finished: int
    statistics: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))


@dataclass
class StopFlags:
    """Requests of this rank to all ranks, carried by the next control message.

    Attributes:
        interrupted: the process was told to end.
        finished: somebody decided that training is done.
    """

    interrupted: bool = False
    finished: bool = False


@dataclass(eq=False)
class MiniBatch:
    """Microbatches that share one update.

    Batches are added to it until :meth:`close`. When its last backward is done, :meth:`launch` sends its gradient on
    the way to the optimizer. From there on until :meth:`finish` nothing blocks, except that with one replica on CPUs
    :meth:`poll` reads the next stage's part of the control message, which follows that stage's last gradient.

    The control message is an fp64 vector, which every rank writes and all are summed: five numbers, and what layers
    counted.

    Attributes:
        mesh: this rank's place.
        index: t.
        first: its first microbatch.
        transport: messages with the neighbours; None in a single stage.
        end: one past its last microbatch; None while more may come (gradient accumulation).
        weight: sum of the microbatches' weights so far.
        counted: what this stage's layers counted in its microbatches.
        hyper_parameters: of every group of the optimizer, for its update, once it is closed.
        note: what the strategy wants to know at its update.
        length: of the control message, once it is closed.
        exchange: of the control messages, once it is closed; None where they travel along the pipeline.
        tied: the sums of gradients that other stages share, once it is closed; None if there are none.
        reduction: of its gradient over the replicas, once that has begun; None with one replica.
        launched: whether its gradient is complete and on the way.
        gradients: name -> summed gradient of this stage, once complete; replaced by the sum over the replicas.
        stepped: whether this stage has stepped ahead of the others.
        squares: name -> the square of a gradient's norm, of those that this stage counts, once the host knows them.
        completed: when its gradient was complete, on the clock of the trace; None if nothing is recorded.
        message: this rank's part of the control message, once it was sent.
    """

    mesh: Mesh
    index: int
    first: int
    transport: Transport | None = None
    end: int | None = None
    weight: float = 0.0
    counted: Collected = field(default_factory=Collected)
    hyper_parameters: HyperParameters = field(default_factory=list)
    note: Any = None
    length: int = 0
    exchange: ControlExchange | None = None
    tied: TiedGradients | None = None
    reduction: Reduction | None = None
    launched: bool = False
    gradients: Gradients = field(default_factory=dict)
    stepped: bool = False
    squares: dict[str, float] = field(default_factory=dict)
    completed: Moment | None = None
    message: Tensor | None = None
    _stop: StopFlags = field(default_factory=StopFlags)
    _uses: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    _counts: Tensor = field(init=False)  # where this stage's layers counted
    _statistics: Tensor | Reading = field(init=False)  # on the host, or on their way there
    _count: tuple[Tensor, dist.Work] | None = None
    _norms: dict[str, Tensor] | None = None
    _reading: Reading | None = None  # of the norms, if they are on a device
    _total: Tensor | None = None  # of all stages, on the first

    def close(self, end: int, num_statistics: int) -> None:
        """No further batch shares the update.

        Args:
            end: one past the last microbatch.
            num_statistics: how many numbers the counts of all layers are.
        """
        self.end, self.length = end, _FIXED + num_statistics

    def launch(
        self,
        gradients: Gradients,
        statistics: Tensor,
        stop: StopFlags,
        uses: Mapping[str, Sequence[Tensor]],
        count_on: torch.device | None = None,
    ) -> None:
        """Start the reduction over the replicas, or begin to read what the control message is to say.

        Messages leave in :meth:`poll`, in the order of the mini-batches.

        In the middle of a pipeline it waits for shared gradients of stages behind, which were complete before its own:
        the stage before waits for the control message, and this one for activations of that stage.

        Args:
            gradients: name -> summed gradient of this stage.
            statistics: what this stage's layers counted, in their places among all layers'; where they counted it.
            stop: what this rank asks for.
            uses: name -> the gradients of several layers of this stage that share a parameter with another stage's, in
                the order in which they are added; none with several replicas, which add them before they reduce.
            count_on: where weights and statistics are summed over the replicas for :meth:`reduce_now`; None: nowhere.
        """
        self.launched, self.gradients, self._stop, self._uses = True, gradients, stop, uses
        self._counts = statistics
        self._statistics = statistics if statistics.is_cpu else Reading([statistics])
        if self.reduction is not None:
            self.reduction.send_rest(gradients)
            self.gradients = self.reduction.gradients  # the stage's own are not needed any more
        elif self.tied is None or not self.mesh.is_first:
            self._read_norms()
        if count_on is not None:
            self._begin_count(statistics, count_on)

    def poll(self) -> bool:
        """Take up what has arrived, and send the control message if that is everything.

        Returns:
            Whether it has been sent.
        """
        if self.message is not None:
            return True
        if self._norms is None:
            if not (self.reduction is None or self.reduction.poll()):
                return False
            if not (self.tied is None or self.tied.have_arrived()):
                return False
            self._read_norms()
        if self.transport is None or self.exchange is not None:
            is_ready = self._is_known()
        else:  # the stages before wait for it
            is_ready = self.mesh.is_last or self.transport.has_part(self.index)
        if is_ready:
            self.send_message()
        return self.message is not None

    def reduce_now(self) -> tuple[float, bool | Tensor, Tensor]:
        """Wait for the replicas, not for the other stages, and not for the device unless there are replicas.

        Returns:
            The sum of the weights over the replicas; whether this stage's gradient is finite, on the device where the
            host does not know; and its statistics over the replicas.
        """
        if self._count is None:
            self._begin_message()
            self.poll()
            return self.weight, self._is_finite(), self._counts
        self.send_message()
        total, work = self._count
        with lost_peers():
            work.wait()
        self._count, counted = None, total.cpu()
        return float(counted[0]), self._is_finite(), counted[1:]

    def let_go(self) -> None:
        """Hold no gradients any more: what is left to wait for are the other stages' sums."""
        self.gradients.clear()
        if self.reduction is not None:
            self.reduction.let_go()

    def finish(self) -> ControlMessage:
        """Wait for what all ranks have to say, and for the whole sums of gradients that stages share."""
        total = self.send_message()
        if self.exchange is not None:
            total = self.exchange.finish()
        elif self.transport is not None:
            total = self.transport.receive_total(self.index, self.length) if self._total is None else self._total
        if self.tied is not None and not self.stepped:
            self.tied.take_whole_sums(self.gradients)
        weight, squares, non_finite, interrupted, finished = total[:_FIXED].tolist()
        norm = gradient_norm(squares, weight)
        return ControlMessage(weight, norm, non_finite == 0, int(interrupted), int(finished), total[_FIXED:])

    def send_message(self) -> Tensor:
        """Send the control message unless it has been sent; waits for the device, once.

        Returns:
            This rank's part of it.
        """
        if self.message is not None:
            return self.message
        # The newest reading first: what was asked for before it is there when it is.
        names, norms = self._begin_message(), self._reading
        numbers = [norm.item() for norm in names.values()] if norms is None else [number for (number,) in norms.get()]
        self.squares = {name: number * number for name, number in zip(names, numbers)}
        if self.reduction is not None:
            self.squares |= self.reduction.squares
        self.message = self._written()
        if self.exchange is not None:
            self.exchange.send(self.message)
        elif self.transport is not None:
            self._pass_on(self.transport, self.message)
        return self.message

    def _pass_on(self, transport: Transport, vector: Tensor) -> None:
        """Add this rank's vector to those of the stages behind; their gradients were complete before.

        Theirs follows the last gradient that came from there, so it is there or about to be: it is waited for.
        """
        if not self.mesh.is_last:
            vector = transport.receive_part(self.index, self.length) + vector
        if not self.mesh.is_first:
            transport.send_part(self.index, vector)
        else:
            self._total = vector
            transport.send_total(self.index, vector)

    def _written(self) -> Tensor:
        """This rank's vector: last stages alone give weights, the first replica alone squares: each counts once."""
        mesh, squares = self.mesh, math.fsum(self.squares.values())  # exactly: their order does not matter
        finite = math.isfinite(squares)
        weight = self.weight if mesh.is_last else 0.0
        squares = squares if mesh.replica == 0 and finite else 0.0  # every replica holds the same gradient
        there = self._statistics
        counts = there.tolist() if isinstance(there, Tensor) else there.get()[0]
        fixed = (weight, squares, not finite, self._stop.interrupted, self._stop.finished)
        return torch.tensor([*fixed, *counts], dtype=torch.float64, device="cpu")

    def _begin_count(self, statistics: Tensor, device: torch.device) -> None:
        """Begin to sum weights and statistics over the replicas, right behind the gradients.

        Later would be a deadlock where streams share a hardware queue: a replica that has come to its update waits for
        one that still needs the activations of a stage that itself waits for a gradient behind this sum.
        """
        assert self.mesh.groups is not None
        total = torch.empty(1 + len(statistics), dtype=torch.float64, device=device)
        total[:1].fill_(self.weight)
        total[1:].copy_(statistics, non_blocking=True)
        with lost_peers():
            work = started(dist.all_reduce(total, group=self.mesh.groups.data_parallel, async_op=True))
        self._count = total, work

    def _begin_message(self) -> dict[str, Tensor]:
        """Begin to read what the control message says, waiting for what that is computed from; the norms by name."""
        if self._norms is None:
            if self.reduction is not None:
                self.reduction.wait()
            self._read_norms()
        assert self._norms is not None
        return self._norms

    def _is_finite(self) -> bool | Tensor:
        """Return whether this stage's share of the gradient is finite; on the device if the host does not know."""
        if self.message is not None or not self._norms:
            return all(map(math.isfinite, self.squares.values()))
        finite = torch.stack(list(self._norms.values())).isfinite().all()
        return bool(finite) if finite.is_cpu else finite

    def _read_norms(self) -> None:
        """Begin to read what of this stage's gradient the host must know: all that is not in the reduction's norms."""
        gradients = self.gradients
        if self.tied is not None:
            self.tied.pass_on(gradients, self._uses)
            names = set(gradients if self.reduction is None else self.tied.names) - self.tied.counted_by_others
            gradients = {name: gradient for name, gradient in gradients.items() if name in names}
        elif self.reduction is not None:
            gradients = {}
        counted = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        norms = norms_of(list(counted.values()))
        self._norms = dict(zip(counted, norms))
        self._reading = None if not norms or norms[0].is_cpu else Reading(norms)

    def _is_known(self) -> bool:
        """Return whether the device has got to everything that the message holds."""
        return all(not isinstance(r, Reading) or r.is_there() for r in (self._reading, self._statistics))


@dataclass(frozen=True)
class Update:
    """An update that is being, or was, applied.

    Attributes:
        mini_batch: t, of the gradient; the update makes W_{t+1}.
        hyper_parameters: of every group of the optimizer, as they were set for mini-batch t.
        note: what the strategy gave to mini-batch t.
        message: what all ranks agreed on; where the stage steps ahead, what it knows itself.
        weights_before: parameter -> W_t, alive as the older version; None without a delay.
        staleness: how many updates old the gradient of this stage is, phi.
    """

    mini_batch: int
    hyper_parameters: HyperParameters
    note: Any
    message: ControlMessage
    weights_before: dict[nn.Parameter, Tensor] | None = None
    staleness: float = 0
