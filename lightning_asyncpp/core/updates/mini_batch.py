"""Mini-batch from its first forward to its update: reduction over replicas, then the sum of control messages.

Control messages are summed in one of two ways, with the same ``send`` and ``wait``: along the pipeline with one replica
on CPUs or in one process (:class:`PipelineSum`), otherwise directly between all ranks (:class:`ExchangeSum`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_asyncpp.auxiliary import Collected
from lightning_asyncpp.core.clipping import gradient_norm, norms_of
from lightning_asyncpp.core.host_copies import Reading
from lightning_asyncpp.core.ranks.mesh import Mesh, started
from lightning_asyncpp.core.trace import Moment
from lightning_asyncpp.core.updates.reduction import Gradients, Reduction, TiedGradients
from lightning_asyncpp.core.updates.update import HyperParameters, StopFlags, Totals
from lightning_asyncpp.core.wire.transport import Transport
from lightning_asyncpp.errors import lost_peers

FIXED = 5
"""Number of numbers in a control message before the layers' statistics."""
MOST_EXCHANGING = 16
"""With several replicas and more ranks than this, an all-reduce sums control messages."""
_CONTROL_TAG = 4


@dataclass(eq=False)
class MiniBatch:
    """Microbatches that share one update, in one of these states; fields that are not set yet have their defaults.

    ========  ================================================  ===================================================
    state     begins with                                       sets
    ========  ================================================  ===================================================
    open      ``UpdateQueue.begin``                             index, first; microbatches add to weight, collected
    complete  ``UpdateQueue.complete``, after the last forward  end, hyper_parameters, note, control_sum, tied
    launched  :meth:`launch`, after the last backward           launched, gradients, gradient_ready
    sent      :meth:`progress`, ``reduce_now`` or ``wait``      squares, own_message
    stepped   a step ahead of the agreement, if any             stepped; no gradients (may precede ``sent``)
    agreed    :meth:`wait`, then the update unless ``stepped``  gradients of shared parameters, summed over stages
    ========  ================================================  ===================================================

    What this rank's message is made of depends on the replicas:

    ============  ================  =======================================================================
    field         one replica       several replicas
    ============  ================  =======================================================================
    _norms        of all gradients  of shared gradients only; of the others ``reduction`` has the squares
    squares       of ``_norms``     of ``_norms``, and those of ``reduction``
    _replica_sum  None              w_k and statistics, from the launch until a step ahead of the agreement
    ============  ================  =======================================================================

    Gradients that another stage counts (:attr:`.TiedGradients.counted_by_others`) are left out of the norms. Fields
    that end in ``_reading`` read the tensors of that name from a GPU; on a CPU they are None.

    Attributes:
        mesh: mesh of ranks.
        index: index t of the mini-batch.
        first: first microbatch.
        end: one past the last microbatch.
        weight: sum of the microbatches' weights w_k.
        collected: statistics of this stage's layers.
        hyper_parameters: hyper-parameters of the optimizer's groups for the update.
        note: value that the strategy receives with the update.
        control_sum: sum of the control messages over all ranks; None with a single rank.
        tied: gradients of parameters shared with other stages; None without such parameters.
        reduction: reduction of the gradient over replicas, from the last backward on; None with one replica.
        gradients: name -> summed gradient of this stage, later the sum over replicas.
        stepped: whether this stage has applied the update before all stages agreed on it.
        squares: name -> squared norm of a gradient that this stage counts, once the host knows it.
        gradient_ready: moment at which the gradient was complete; None without a trace.
        own_message: this rank's control message, fp64: five numbers, and the statistics of all layers.
    """

    mesh: Mesh
    index: int
    first: int
    end: int | None = None
    weight: float = 0.0
    collected: Collected = field(default_factory=Collected)
    hyper_parameters: HyperParameters = field(default_factory=list)
    note: Any = None
    control_sum: PipelineSum | ExchangeSum | None = None
    tied: TiedGradients | None = None
    reduction: Reduction | None = None
    launched: bool = False
    gradients: Gradients = field(default_factory=dict)
    stepped: bool = False
    squares: dict[str, float] = field(default_factory=dict)
    gradient_ready: Moment | None = None
    own_message: Tensor | None = None
    _stop: StopFlags = field(default_factory=StopFlags)
    _uses: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    _norms: dict[str, Tensor] | None = None
    _norms_reading: Reading | None = None
    _statistics: Tensor = field(init=False)
    _statistics_reading: Reading | None = None
    _replica_sum: tuple[Tensor, dist.Work] | None = None

    def launch(
        self,
        gradients: Gradients,
        statistics: Tensor,
        stop: StopFlags,
        uses: Mapping[str, Sequence[Tensor]],
        replica_sum_device: torch.device | None = None,
    ) -> None:
        """Start the rest of the reduction over replicas; with one replica, start to compute the control message.

        Messages are sent by :meth:`progress`, in the order of the mini-batches.

        With one replica, a stage after the first waits here for later stages' gradients of shared parameters. The wait
        is short, since later stages complete their gradients before this stage. A later wait could be a deadlock: this
        stage would wait for the previous stage's activations, and the previous stage for this stage's control message.

        Args:
            gradients: name -> summed gradient of this stage.
            statistics: statistics of all layers, zero except for this stage's layers, on their device.
            stop: stop requests of this rank.
            uses: name of a parameter shared with another stage -> gradients of its uses on this stage, in the order of
                addition. Empty with replicas, where uses are added before the reduction.
            replica_sum_device: device on which the microbatches' weights w_k and the statistics are summed over
                replicas for :meth:`reduce_now`; None if they are not summed.
        """
        self.launched, self.gradients, self._stop, self._uses = True, gradients, stop, uses
        self._statistics = statistics
        self._statistics_reading = None if statistics.is_cpu else Reading([statistics])
        if self.reduction is not None:
            self.reduction.send_rest(gradients)
            self.gradients = self.reduction.gradients  # frees the gradients of this replica
        elif self.tied is None or not self.mesh.is_first:
            self._read_norms()
        if replica_sum_device is not None:
            self._begin_replica_sum(statistics, replica_sum_device)

    def progress(self) -> bool:
        """Process what has arrived, send the control message if it is complete, and return whether it has been sent.

        With one replica on CPUs, this waits for the next stage's message, which follows that stage's last gradient.
        """
        if self.own_message is not None:
            return True
        if self._norms is None:
            if not (self.reduction is None or self.reduction.progress()):
                return False
            if not (self.tied is None or self.tied.have_arrived()):
                return False
            self._read_norms()
        # Along the pipeline earlier stages wait for the message, so this stage may wait for its device.
        summing = self.control_sum
        is_ready = summing.is_ready() if isinstance(summing, PipelineSum) else self._is_known()
        if is_ready:
            self.send_message()
        return is_ready

    def reduce_now(self) -> tuple[float, bool | Tensor, Tensor]:
        """Wait for the reduction over replicas, but not for the agreement of all stages.

        With one replica, the host does not wait for the device.

        Returns:
            Sum of the microbatches' weights w_k over replicas; whether this stage's gradient is finite, as a tensor if
            the host does not know yet; sum of this stage's statistics over replicas.
        """
        if self._replica_sum is None:
            self._begin_message()
            self.progress()
            return self.weight, self._is_finite(), self._statistics
        self.send_message()
        total, work = self._replica_sum
        with lost_peers():
            work.wait()
        self._replica_sum, summed = None, total.cpu()
        return float(summed[0]), self._is_finite(), summed[1:]

    def group_norm(self, names: Iterable[str], weight: float) -> float | Tensor:
        """Return the norm of some gradients over ``weight``, before the agreement; on a GPU it may be a tensor."""
        squares, rest, norms = 0.0, list[Tensor](), self._norms or {}
        for name in names:
            gradient = self.gradients.get(name)
            if name in self.squares:
                squares += self.squares[name]
            elif gradient is not None:  # another stage may count its norm
                rest.append(norms[name] if name in norms else norms_of([gradient])[0])
        return gradient_norm(squares + torch.stack(rest).square().sum() if rest else squares, weight)

    def release(self) -> None:
        """Free the gradients; only the control message is still needed."""
        self.gradients.clear()
        if self.reduction is not None:
            self.reduction.release()

    def wait(self) -> Totals:
        """Wait for the control messages of all ranks, and for the sums of shared gradients over all stages."""
        total = self.send_message()
        if self.control_sum is not None:
            total = self.control_sum.wait()
        if self.tied is not None and not self.stepped:
            self.tied.take_whole_sums(self.gradients)
        weight, squares, non_finite, interrupted, finished = total[:FIXED].tolist()
        norm = float(gradient_norm(squares, weight))
        return Totals(weight, norm, non_finite == 0, int(interrupted), int(finished), total[FIXED:])

    def send_message(self) -> Tensor:
        """Send the control message unless it has been sent; wait at most once for the device.

        Returns:
            This rank's message.
        """
        if self.own_message is not None:
            return self.own_message
        # Wait for the newest reading: when it is complete, earlier readings are, too.
        norms, read = self._begin_message(), self._norms_reading
        numbers = [norm.item() for norm in norms.values()] if read is None else [number for (number,) in read.get()]
        self.squares = {name: number * number for name, number in zip(norms, numbers)}
        if self.reduction is not None:
            self.squares |= self.reduction.squares
        self.own_message = self._written()
        if self.control_sum is not None:
            self.control_sum.send(self.own_message)
        return self.own_message

    def _written(self) -> Tensor:
        """Return this rank's message. Only last stages add the weights w_k, and only the first replica adds squares."""
        mesh, squares = self.mesh, math.fsum(self.squares.values())  # exact, so that the order does not matter
        finite = math.isfinite(squares)
        weight = self.weight if mesh.is_last else 0.0
        squares = squares if mesh.replica == 0 and finite else 0.0  # all replicas have the same gradient
        read = self._statistics_reading
        counts = self._statistics.tolist() if read is None else read.get()[0]
        fixed = (weight, squares, not finite, self._stop.interrupted, self._stop.finished)
        return torch.tensor([*fixed, *counts], dtype=torch.float64, device="cpu")

    def _begin_replica_sum(self, statistics: Tensor, device: torch.device) -> None:
        """Start to sum the microbatches' weights w_k and the statistics over replicas, right behind the gradients.

        If this sum started only at the update, it could deadlock where streams share a hardware queue. This stage
        would wait for the same stage of another replica. That stage would wait for activations from an earlier stage,
        which waits for a gradient that is queued behind this sum.
        """
        assert self.mesh.groups is not None
        total = torch.empty(1 + len(statistics), dtype=torch.float64, device=device)
        total[:1].fill_(self.weight)
        total[1:].copy_(statistics, non_blocking=True)
        with lost_peers():
            work = started(dist.all_reduce(total, group=self.mesh.groups.data_parallel, async_op=True))
        self._replica_sum = total, work

    def _begin_message(self) -> dict[str, Tensor]:
        """Wait for the reduction, start to compute the norms if this is not done yet, and return the norms by name."""
        if self._norms is None:
            if self.reduction is not None:
                self.reduction.wait()
            self._read_norms()
        assert self._norms is not None
        return self._norms

    def _is_finite(self) -> bool | Tensor:
        """Return whether this stage's gradient is finite, as a tensor if the host does not know yet."""
        if self.own_message is not None or not self._norms:
            return all(map(math.isfinite, self.squares.values()))
        finite = torch.stack(list(self._norms.values())).isfinite().all()
        return bool(finite) if finite.is_cpu else finite

    def _read_norms(self) -> None:
        """Pass shared gradients on; start to compute and read the norms that the reduction does not provide."""
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
        self._norms_reading = None if not norms or norms[0].is_cpu else Reading(norms)

    def _is_known(self) -> bool:
        """Return whether all numbers of the message have been read from the device."""
        return all(read is None or read.is_there() for read in (self._norms_reading, self._statistics_reading))


@dataclass(eq=False)
class PipelineSum:
    """Sum of a mini-batch's control messages along the pipeline, with one replica on CPUs or in one process.

    Gradients become complete stage by stage, from the last to the first. An all-reduce would start only when the first
    stage is ready, and then take further rounds. So each stage adds its message to the sum over all later stages, and
    sends the new sum to the previous stage, right after the last gradient. When the first stage is ready, the sum of
    all later stages has arrived. The first stage sends the total to the next stage, which passes it on. So each stage's
    number of messages does not grow with the number of stages.

    Attributes:
        mesh: mesh of ranks.
        transport: transport to the neighbours.
        mini_batch: index t of the mini-batch.
    """

    mesh: Mesh
    transport: Transport
    mini_batch: int
    _total: Tensor | None = None  # on the first stage

    def is_ready(self) -> bool:
        """Return whether the sum over later stages is there, or a wait for it is short."""
        return self.mesh.is_last or self.transport.has_partial_sum(self.mini_batch)

    def send(self, message: Tensor) -> None:
        """Add this rank's vector (length,) to the sum over later stages, and send it to the previous stage.

        The sum follows the last gradient from the next stage, so a wait for it is short.
        """
        if not self.mesh.is_last:
            message = self.transport.receive_partial_sum(self.mini_batch) + message
        if not self.mesh.is_first:
            self.transport.send_partial_sum(self.mini_batch, message)
        else:
            self._total = message
            self.transport.send_total(self.mini_batch, message)

    def wait(self) -> Tensor:
        """Wait for the vectors of all stages, and return their sum (length,)."""
        return self.transport.receive_total(self.mini_batch) if self._total is None else self._total


class ExchangeSum:
    """Sum of a mini-batch's control messages over all ranks, with replicas or on GPUs.

    Every rank sends its message to all other ranks; with several replicas and many ranks, an all-reduce sums the
    messages. Messages cannot follow the gradients along the pipeline (:class:`PipelineSum`): replicas finish in any
    order, and on GPUs each host, far ahead of its device, would wait for all later stages' GPUs.

    Args:
        mesh: connected mesh of ranks.
        length: length of the vectors, the same on all ranks.
    """

    def __init__(self, mesh: Mesh, length: int) -> None:
        assert mesh.groups is not None
        self.mesh = mesh
        self._group = mesh.groups.control
        # With one replica, other collectives use the same group. Ranks would start an all-reduce at different times, so
        # it could be mixed up with those collectives.
        shares_group = mesh.groups.control is mesh.groups.host
        self._pairwise = mesh.world_size <= MOST_EXCHANGING or shares_group
        self._works: list[dist.Work] = []
        # One row per rank, or a single row for the all-reduce.
        rows = mesh.world_size if self._pairwise else 1
        self._messages = torch.zeros((rows, length), dtype=torch.float64, device="cpu")
        if self._pairwise:
            with lost_peers():
                for rank in self._others():
                    row = self._messages[rank]
                    self._works.append(started(dist.irecv(row, rank, group=self._group, tag=_CONTROL_TAG)))

    def send(self, message: Tensor) -> None:
        """Send this rank's vector (length,) without waiting."""
        if not self._pairwise:
            self._messages[0] = message
            with lost_peers():
                self._works.append(started(dist.all_reduce(self._messages[0], group=self._group, async_op=True)))
            return
        own = self._messages[self.mesh.rank]
        own.copy_(message)
        with lost_peers():
            for rank in self._others():
                self._works.append(started(dist.isend(own, rank, group=self._group, tag=_CONTROL_TAG)))

    def wait(self) -> Tensor:
        """Wait for all vectors, and return their sum (length,)."""
        with lost_peers():
            for work in self._works:
                work.wait()
        self._works.clear()
        return self._messages.sum(0)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.mesh.world_size) if rank != self.mesh.rank]
