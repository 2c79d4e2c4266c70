"""A mini-batch from its first forward to its update: sums over replicas, then the one control message."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_asyncpp.auxiliary import Collected
from lightning_asyncpp.core import foreach
from lightning_asyncpp.core.host_copies import Reading
from lightning_asyncpp.core.ranks.mesh import Mesh, started
from lightning_asyncpp.core.stage_optimizer import HyperParameters
from lightning_asyncpp.core.trace import Moment
from lightning_asyncpp.core.updates.control_message import (
    ControlChain,
    ControlMessage,
    ControlSum,
    MessageLayout,
    Payload,
    StopFlags,
)
from lightning_asyncpp.core.updates.reduction import Gradients, Reduction
from lightning_asyncpp.core.updates.tied_gradients import TiedGradients
from lightning_asyncpp.errors import lost_peers


@dataclass(eq=False)
class MiniBatch:
    """Micro-batches that share one update.

    Batches are added to it until :meth:`close`. When its last backward is done, :meth:`launch` sends its gradient on
    the way to the optimizer. From there on until :meth:`finish` nothing waits, but for what is there or about to be:
    with one replica on CPUs :meth:`poll` reads what the stages behind have added to the control message, which follows
    the last gradient that came from there.

    Attributes:
        mesh: this rank's place.
        index: t.
        first: its first micro-batch.
        end: one past its last micro-batch; None while more may come (gradient accumulation).
        weight: sum of the micro-batches' weights so far.
        counted: what this stage's layers counted in its micro-batches.
        hyper_parameters: of every group of the optimizer, for its update, once it is closed.
        note: what the strategy wants to know at its update.
        payload: this replica's attachment to the control message, of the same length on all ranks.
        layout: of its control message, once it is closed.
        exchange: of the control messages, once it is closed; None in a world of one rank.
        tied: the sums of gradients that other stages share, once it is closed; None if there are none.
        reduction: of its gradient over the replicas, once that has begun; None with one replica.
        launched: whether its gradient is complete and on the way.
        gradients: name -> summed gradient of this stage, once complete; replaced by the sum over the replicas.
        stepped: whether this stage has stepped ahead of the others.
        completed: when its gradient was complete, on the clock of the trace; None if nothing is recorded.
    """

    mesh: Mesh
    index: int
    first: int
    end: int | None = None
    weight: float = 0.0
    counted: Collected = field(default_factory=Collected)
    hyper_parameters: HyperParameters = field(default_factory=list)
    note: Any = None
    payload: Payload = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    layout: MessageLayout = field(init=False)
    exchange: ControlSum | None = None
    tied: TiedGradients | None = None
    reduction: Reduction | None = None
    launched: bool = False
    gradients: Gradients = field(default_factory=dict)
    stepped: bool = False
    completed: Moment | None = None
    _stop: StopFlags = field(default_factory=StopFlags)
    _uses: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    _counts: Reading = field(init=False)
    _count: tuple[Tensor, dist.Work] | None = None
    _norms: Reading | None = None
    _squares: float = 0.0
    _message: Tensor | None = None

    def close(self, end: int, num_statistics: int, payload: Payload | None = None) -> None:
        """No further batch shares the update.

        Args:
            end: one past the last micro-batch.
            num_statistics: how many numbers the counts of all layers are.
            payload: what the control message carries; None: nothing.
        """
        self.end = end
        if payload is not None:
            self.payload = payload
        self.layout = MessageLayout(self.mesh, num_statistics, self.payload)

    def launch(
        self,
        gradients: Gradients,
        statistics: Tensor,
        stop: StopFlags,
        uses: Mapping[str, Sequence[Tensor]],
        steps_ahead: bool = False,
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
            steps_ahead: whether :meth:`reduce_now` will be called.
        """
        self.launched, self.gradients, self._stop, self._uses = True, gradients, stop, uses
        self._counts = Reading([statistics])
        if self.reduction is not None:
            self.reduction.send_rest(gradients)
            self.gradients = self.reduction.gradients  # the stage's own are not needed any more
            if steps_ahead:
                self._begin_count(statistics)
            return
        if self.tied is None or not self.mesh.is_first:
            self._read_norms()

    def poll(self) -> bool:
        """Take up what has arrived, and send the control message if that is everything.

        Returns:
            Whether it has been sent.
        """
        if not self.launched:
            return False
        if self._message is not None:
            return True
        if self._norms is None:
            if not (self.reduction is None or self.reduction.poll()):
                return False
            if not (self.tied is None or self.tied.have_arrived()):
                return False
            self._read_norms()
        if self.can_send() and (isinstance(self.exchange, ControlChain) or self._is_known()):  # others wait in a chain
            self._send_message()
        return self._message is not None

    def can_send(self) -> bool:
        """Whether the control message, unless it has been sent, need not wait for a stage behind in this process."""
        return self._message is not None or not isinstance(self.exchange, ControlChain) or self.exchange.can_send()

    def reduce_now(self) -> tuple[float, float, Tensor]:
        """Wait for the replicas, not for the other stages; the control message is sent.

        Returns:
            The sum of the weights over the replicas; this stage's sum of squares; and its statistics
            over the replicas.
        """
        statistics = self.layout.statistics(self._send_message())
        if self._count is None:
            return self.weight, self._squares, statistics
        total, work = self._count
        with lost_peers():
            work.wait()
        self._count, counted = None, total.cpu()
        return float(counted[0]), self._squares, counted[1:]

    def let_go(self) -> None:
        """Hold no gradients any more: what is left to wait for are the other stages' sums."""
        self.gradients.clear()
        if self.reduction is not None:
            self.reduction.let_go()

    def finish(self) -> ControlMessage:
        """Wait for what all ranks have to say, and for the whole sums of gradients that stages share."""
        total = self._send_message()
        if self.exchange is not None:
            with lost_peers():
                total = self.exchange.finish()
        if self.tied is not None and not self.stepped:
            self.tied.take_whole_sums(self.gradients)
        return self.layout.read(total)

    def _begin_count(self, statistics: Tensor) -> None:
        """Begin to sum weights and statistics over the replicas, right behind the gradients.

        Later would be a deadlock where streams share a hardware queue: a replica that has come to its update waits for
        one that still needs the activations of a stage that itself waits for a gradient behind this sum.
        """
        assert self.mesh.groups is not None
        assert self.reduction is not None
        total = torch.empty(1 + len(statistics), dtype=torch.float64, device=self.reduction.device)
        total[:1].fill_(self.weight)
        total[1:].copy_(statistics, non_blocking=True)
        with lost_peers():
            work = started(dist.all_reduce(total, group=self.mesh.groups.data_parallel, async_op=True))
        self._count = total, work

    def _read_norms(self) -> None:
        """Begin to read what of this stage's gradient the host must know: all that is not in the reduction's norms."""
        if self.tied is not None:
            self.tied.pass_on(self.gradients, self._uses)
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

    def _send_message(self) -> Tensor:
        """Send the control message unless it has been sent; waits for the device, once.

        Returns:
            This rank's part of it.
        """
        if self._message is not None:
            return self._message
        if self._norms is None:
            if self.reduction is not None:
                self.reduction.wait()
            self._read_norms()
        assert self._norms is not None
        # The newest reading first: what was asked for before it is there when it is. Added exactly, so that the order
        # of the squares does not matter.
        (norms,) = self._norms.get()
        reduced = self.reduction.squares if self.reduction is not None else []
        self._squares = math.fsum([*reduced, *(norm * norm for norm in norms)])
        (counts,) = self._counts.get()
        self._message = self.layout.write(self.weight, self._squares, counts, self._stop, self.payload)
        if self.exchange is not None:
            with lost_peers():
                self.exchange.send(self._message)
        return self._message


@dataclass(frozen=True)
class Update:
    """An update that is being, or was, applied.

    Attributes:
        mini_batch: t, of the gradient; the update makes W_{t+1}.
        hyper_parameters: of every group of the optimizer, as they were set for mini-batch t.
        note: what the strategy gave to mini-batch t.
        message: what all ranks agreed on.
        weights_before: parameter -> W_t, alive as the older version; None without a delay.
        staleness: how many updates old the gradient of this stage is, phi.
    """

    mini_batch: int
    hyper_parameters: HyperParameters
    note: Any
    message: ControlMessage
    weights_before: dict[nn.Parameter, Tensor] | None = None
    staleness: float = 0
