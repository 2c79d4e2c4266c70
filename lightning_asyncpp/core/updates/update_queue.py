"""Queue of mini-batches between their last forward and their update."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_asyncpp.core import foreach
from lightning_asyncpp.core.clipping import larger
from lightning_asyncpp.core.cut.ties import clip_groups_on, names_on, trained_on
from lightning_asyncpp.core.randomness import drawing_from
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.core.runner import StageRunner
from lightning_asyncpp.core.schedule import Action, Kind, Schedule
from lightning_asyncpp.core.settings import ResolvedSettings
from lightning_asyncpp.core.trace import HOST, Activity, Trace, Wait
from lightning_asyncpp.core.updates.mini_batch import FIXED, ExchangeSum, MiniBatch, PipelineSum
from lightning_asyncpp.core.updates.reduction import (
    BUCKET_BYTES,
    GPU_BUCKET_BYTES,
    Gradients,
    Reduction,
    TiedGradients,
    plan_buckets,
    tags_of,
)
from lightning_asyncpp.core.updates.update import HyperParameters, StepInput, StopFlags, Update
from lightning_asyncpp.core.weights import WeightVersions
from lightning_asyncpp.errors import NonFiniteGradientError

_KNOWN_STARTS = 8  # more mini-batches than are in flight at the same time


class UpdateQueue:
    """Queue of a stage's updates.

    Args:
        mesh: mesh of ranks.
        settings: resolved settings of the pipeline.
        runner: runner of the stage, for its transport and trace.
        weights: weight versions of the stage.
        schedule: schedule of the stage.

    Attributes:
        open: mini-batch to which batches are added.
        pending: complete mini-batches, in order, until their updates are applied and all ranks' messages are read.
        last_norm: norm of the newest finite gradient that all ranks have agreed on; None before the first.
        requested: stop requests of this rank.
        agreed: stop requests of any rank, once all ranks know them.
        optimizer_step: function that steps the optimizer; it is called while the parameters have gradients.
        reduces: whether gradients are reduced over replicas.
        busy: whether :meth:`progress` may have work.
    """

    def __init__(
        self,
        mesh: Mesh,
        settings: ResolvedSettings,
        runner: StageRunner,
        weights: WeightVersions,
        schedule: Schedule,
    ) -> None:
        self.mesh, self.settings, self.runner, self.weights, self.schedule = mesh, settings, runner, weights, schedule
        self._starts: deque[tuple[int, int]] = deque(maxlen=_KNOWN_STARTS)
        self.begin(0, 0)
        self.pending: deque[MiniBatch] = deque()
        self.last_norm: float | None = None
        self.requested = StopFlags()
        self.agreed = StopFlags()
        self.optimizer_step: Callable[[StepInput], None]
        self.detach()
        is_local = runner.transport is not None and runner.transport.is_local
        self._host_runs_ahead = torch.empty(0, device=runner.device).is_cuda and not is_local
        self._ties = trained_on(mesh.stage, runner.stage.whole.ties, weights.parameters)
        self._tied = names_on(mesh.stage, self._ties)
        here = weights.parameters
        self._clip_groups = [
            {name: here[name] for name in names} for names in clip_groups_on(mesh.stage, self._ties, here)
        ]
        self.train_only(weights.parameters)
        self._no_statistics = torch.zeros(0, dtype=torch.float64, device="cpu")
        self._next_backward = 0
        self.busy = False
        self._applied: list[Update] = []  # since the last take_applied()
        self._dropped: deque[MiniBatch] = deque()  # their gradients belong to no update
        self._sending: deque[TiedGradients] = deque()  # kept until their sends have completed

    def train_only(self, names: Collection[str]) -> None:
        """Restrict norms and reductions to the gradients of parameters that the optimizer has.

        Args:
            names: names of parameters of this stage; parameters shared with other stages are always included.
        """
        self._optimized = {n: p for n, p in self.weights.parameters.items() if n in names or n in self._tied}
        size, complete_late = GPU_BUCKET_BYTES if self._host_runs_ahead else BUCKET_BYTES, self.weights.used_twice
        self._buckets = plan_buckets(self._optimized, size, complete_late) if self.mesh.num_replicas > 1 else []
        self.reduces = bool(self._buckets)

    def detach(self) -> None:
        """Detach the optimizer."""
        self.optimizer_step = _no_optimizer

    def begin(self, index: int, first: int) -> None:
        """Open mini-batch ``index`` at microbatch ``first``, for the first time or after its gradient was dropped."""
        self.open = MiniBatch(self.mesh, index, first)
        self._starts.append((index, first))

    def begin_at(self, index: int, first: int) -> None:
        """Open mini-batch ``index`` at microbatch ``first``, to resume a run."""
        self._starts.clear()
        self.begin(index, first)

    def begun(self, end: int) -> list[tuple[int, int]]:
        """Return (index, first microbatch) of the last few mini-batches that began before microbatch ``end``.

        A mini-batch whose gradient was dropped is listed again, with the first microbatch after the drop.
        """
        return [start for start in self._starts if start[1] < end]

    @property
    def num_applied(self) -> int:
        """Number of updates that this stage has applied or skipped."""
        return next((mini_batch.index for mini_batch in self.pending if not mini_batch.stepped), self.open.index)

    def complete(self, end: int, hyper_parameters: HyperParameters | None, note: Any) -> None:
        """Complete the open mini-batch, which ends before microbatch ``end``; see :meth:`.Engine.complete`."""
        mini_batch, whole = self.open, self.runner.stage.whole
        mini_batch.end, mini_batch.hyper_parameters, mini_batch.note = end, hyper_parameters or [], note
        if self.mesh.world_size > 1 and (self.mesh.num_replicas > 1 or self._host_runs_ahead):
            # Create the exchange early, so that this rank posts receives before other ranks send.
            mini_batch.control_sum = ExchangeSum(self.mesh, FIXED + whole.statistics.length)
        elif self.runner.transport is not None:
            mini_batch.control_sum = PipelineSum(self.mesh, self.runner.transport, mini_batch.index)
        if self._ties:
            tags = tags_of(self._ties, whole.ties, mini_batch.index)
            mini_batch.tied = TiedGradients(self.mesh, self._ties, dict(self.weights.parameters), tags)
        self.pending.append(mini_batch)
        self.begin(mini_batch.index + 1, end)
        self.busy = True

    def drop_open(self, end: int, next_backward: int) -> None:
        """Discard the gradient of the open mini-batch's microbatches, up to ``end``, once their backwards have run."""
        dropped = self.open
        dropped.end = end
        self._dropped.append(dropped)
        self.begin(dropped.index, end)
        self.progress(next_backward)

    def reducing(self, k: int, weights: dict[str, Tensor]) -> AbstractContextManager[None]:
        """Return a context for microbatch ``k``'s backward, which starts the reduction if a mini-batch ends with it."""
        complete = next((m for m in self.pending if m.end == k + 1), None)
        if complete is None:
            return nullcontext()
        complete.reduction = self._new_reduction()
        return complete.reduction.watching(weights, self.weights.gradient)

    def progress(self, next_backward: int | None = None) -> None:
        """Launch (:meth:`MiniBatch.launch`) mini-batches whose backwards are all done, and process arrived messages.

        Launching starts the rest of the reduction, or the control message. Two short waits can block: for the next
        stage's message in :meth:`MiniBatch.progress`, and for shared gradients in ``launch``.

        Control messages are sent in the order of the mini-batches, since in an exchange only their order tells them
        apart.

        Args:
            next_backward: next microbatch whose backward runs; default: as in the last call.
        """
        done = self._next_backward = self._next_backward if next_backward is None else next_backward
        while self._dropped and done >= (self._dropped[0].end or 0):
            self._dropped.popleft()
            self.weights.take_gradients()
        in_order = True
        for mini_batch in self.pending:
            if not mini_batch.launched:
                if done < (mini_batch.end or 0):
                    in_order = False
                    break
                self._launch(mini_batch)
            in_order = in_order and mini_batch.progress()
        while self._sending and self._sending[0].have_been_sent():
            self._sending.popleft()
        self.busy = not in_order or bool(self._dropped or self._sending)

    def step_mid_batch(self) -> None:
        """Apply the previous mini-batch's update, before the open mini-batch's first forward on the newer weights.

        No other update is outstanding: :meth:`iter_due` has applied earlier ones at the end of the previous mini-batch.

        Raises:
            NonFiniteGradientError: a gradient is not finite under the policy ``"stop"``. Not raised here if the stage
                steps ahead (see :meth:`.Schedule.steps_ahead`).
        """
        if not self.pending or self.pending[0].stepped:  # applied before: by a drain, or before a drop
            return
        if self.schedule.steps_ahead(self.pending[0].index):
            self._step_ahead(self.pending[0])
        else:
            self._applied.append(self._read_totals_and_step(self.pending.popleft()))

    def iter_due(self) -> Iterator[Action]:
        """Apply the updates due after the last complete mini-batch t: up to t - delay or, after a flush, up to t.

        A stage that runs no microbatch on older weights also steps for t, ahead of the other stages.

        Raises:
            NonFiniteGradientError: a gradient is not finite under the policy ``"stop"``; raised on every rank.
        """
        due = self.schedule.pipeline_rule.updates_due(self.open.index - 1)
        while self.pending and self.pending[0].index < due:
            yield from self._iter_apply()
        newest = self.pending[-1] if self.pending else None
        if newest is not None and self.schedule.stage_rule.num_stale == 0 and self.schedule.steps_ahead(newest.index):
            yield Action(Kind.UPDATE, newest.index)
            self._step_ahead(newest)

    def iter_all(self) -> Iterator[Action]:
        """Apply the updates of all complete mini-batches; their backwards must be done."""
        while self.pending:
            yield from self._iter_apply()
        while self._sending:
            self._sending.popleft().settle()

    def take_applied(self) -> list[Update]:
        """Return the updates applied since the last call, in order."""
        updates, self._applied = self._applied, []
        return updates

    def _iter_apply(self) -> Iterator[Action]:
        mini_batch = self.pending[0]
        if self.schedule.steps_ahead(mini_batch.index) and not mini_batch.stepped:
            yield Action(Kind.UPDATE, mini_batch.index)  # does not wait for the agreement
            self._step_ahead(mini_batch)
        yield Action(Kind.UPDATE, mini_batch.index)
        self._applied.append(self._read_totals_and_step(self.pending.popleft()))

    def _launch(self, mini_batch: MiniBatch) -> None:
        split_uses = self._tied & self.weights.used_twice if self._tied and not self.reduces else ()
        uses = {name: self.weights.gradients_apart(name) for name in split_uses}
        gradients = self.weights.take_gradients()
        for name in gradients.keys() - self._optimized.keys():
            gradients[name] = None
        if self.reduces and mini_batch.reduction is None:
            mini_batch.reduction = self._new_reduction()
        stage, statistics = self.runner.stage, self._no_statistics
        if stage.whole.statistics.length:
            collected = mini_batch.collected.take_statistics()
            statistics = stage.whole.statistics.pack(collected, stage.counting_layers)
        if mini_batch.tied is not None:
            self._sending.append(mini_batch.tied)
        if self.runner.trace is not None:
            mini_batch.gradient_ready = self.runner.trace.clock.now()
        sums_now = self.mesh.num_replicas > 1 and self.schedule.steps_ahead(mini_batch.index)
        replica_sum_device = self.runner.device if sums_now else None
        mini_batch.launch(gradients, statistics, replace(self.requested), uses, replica_sum_device)

    def _new_reduction(self) -> Reduction:
        assert self.mesh.groups is not None
        assert self.mesh.groups.data_parallel is not None
        clock = HOST if self.runner.trace is None else self.runner.trace.clock
        group, complete_late = self.mesh.groups.data_parallel, self.weights.used_twice
        return Reduction(self._buckets, group, complete_late=complete_late, excluded_from_norm=self._tied, clock=clock)

    def _step_ahead(self, mini_batch: MiniBatch) -> None:
        """Apply the update before other stages' gradients are known; see :func:`.larger` for clipping.

        A stage steps ahead only from mini-batch 1 on, so ``last_norm`` exists unless every earlier mini-batch was
        empty; then it counts as 0.

        This waits for replicas and for gradients of shared parameters. If the host knows that the gradient is not
        finite, the optimizer does not step. If only the device can tell, the device replaces such a gradient by zeros,
        and the optimizer steps. All ranks stop once the control message arrives.
        """
        if mini_batch.stepped:
            return
        assert mini_batch.launched, "a stage steps only after the mini-batch's last backward"
        with self.runner.span(Wait.AGREEMENT, mini_batch.index):
            weight, finite, statistics = mini_batch.reduce_now()
            if mini_batch.tied is not None:
                mini_batch.tied.take_whole_sums(mini_batch.gradients)
        norm = 0.0 if self.last_norm is None else self.last_norm
        norms = [larger(norm, mini_batch.group_norm(group, weight)) for group in self._clip_groups]
        if isinstance(finite, Tensor):
            for gradient in mini_batch.gradients.values():
                if gradient is not None:
                    gradient.masked_fill_(~finite, 0.0)
            finite = True
        self._advance_and_step(mini_batch, weight, statistics, norms, finite and weight > 0)
        mini_batch.release()
        mini_batch.stepped = True

    def _read_totals_and_step(self, mini_batch: MiniBatch) -> Update:
        """Wait for all ranks' control messages of a mini-batch, and apply its update unless it has been applied."""
        with self.runner.span(Wait.AGREEMENT, mini_batch.index):
            totals = mini_batch.wait()
        if self.runner.trace is not None:
            self._record_background(mini_batch, self.runner.trace)
        self.agreed.interrupted |= totals.interrupted > 0
        self.agreed.finished |= totals.finished > 0
        if totals.weight and totals.finite:
            self.last_norm = totals.norm
        if not totals.finite and self.settings.nonfinite_gradients == "stop":
            raise NonFiniteGradientError(_non_finite(mini_batch, self.schedule.agrees_first))
        if not mini_batch.stepped:
            norms, is_sound = [totals.norm] * len(self._clip_groups), totals.finite and totals.weight > 0
            self._advance_and_step(mini_batch, totals.weight, totals.statistics, norms, is_sound)
        return Update(mini_batch.index, totals)

    def _advance_and_step(
        self, mini_batch: MiniBatch, weight: float, statistics: Tensor, norms: Sequence[float | Tensor], is_sound: bool
    ) -> None:
        """Add a weight version; step the optimizer if ``is_sound``: finite gradient, and weight in the loss above 0.

        Each clipping group of the gradient is clipped by its norm in ``norms``. For ``weight`` and ``statistics`` see
        :class:`.StepInput`.
        """
        older, count = self.weights.advance(), (mini_batch.end or 0) - mini_batch.first
        if is_sound:
            groups = list(zip(map(dict.values, self._clip_groups), norms))
            staleness = self.schedule.stage_rule.staleness_of(mini_batch.index, count)
            own = mini_batch.index, mini_batch.hyper_parameters, mini_batch.note
            step = StepInput(*own, weight, statistics, groups, older, staleness)
            self._run_optimizer(mini_batch.gradients, step)

    def _run_optimizer(self, gradients: Gradients, step: StepInput) -> None:
        """Step the optimizer while the parameters have the mean gradient.

        Random numbers of the step and its hooks depend only on the stage and the update, not on the time of the step.
        """
        if there := [gradient for gradient in gradients.values() if gradient is not None]:
            foreach.divide_(there, step.weight)
        runner, index = self.runner, step.mini_batch
        for name, parameter in self.weights.parameters.items():
            parameter.grad = gradients.get(name)
        try:
            with (
                drawing_from(runner.seed, runner.device, "update", self.mesh.stage, index),
                runner.span(Kind.UPDATE, index, self.weights.newest),
            ):
                self.optimizer_step(step)
                self.weights.note_step()
                counts = step.statistics.to(runner.device, non_blocking=True)
                runner.stage.update_from_statistics(counts)
        finally:
            for parameter in self.weights.parameters.values():
                parameter.grad = None

    def _record_background(self, mini_batch: MiniBatch, trace: Trace) -> None:
        reduction, index = mini_batch.reduction, mini_batch.index
        if mini_batch.gradient_ready is not None:
            trace.record(Activity.PENDING, index, mini_batch.gradient_ready, trace.clock.now())
        if reduction is not None and reduction.started is not None:
            # The host's clock reads a callback of each bucket, and buckets may arrive in another order.
            end = max(reduction.ends) if trace.clock is HOST else reduction.ends[-1]  # type: ignore[type-var]
            trace.record(Activity.REDUCE, index, reduction.started, end, num_bytes=reduction.num_bytes)


def _no_optimizer(_: StepInput) -> None:
    raise RuntimeError("there is no optimizer for an update: call the session's attach() first")


def _non_finite(mini_batch: MiniBatch, agrees_first: bool) -> str:
    stage = mini_batch.mesh.stage
    bad = [name for name, square in mini_batch.squares.items() if not math.isfinite(square)]
    where = f"on this stage ({stage}): {', '.join(bad[:5])}" if bad else f"not on this stage ({stage})"
    return (
        f"the gradient of mini-batch {mini_batch.index} holds NaN or Inf ({where}); this update was not applied"
        f"{', except on stages that step before all gradients are known' if mini_batch.stepped else ''}."
        " Lower the learning rate, clip gradients, or set nonfinite_gradients='skip'"
        + ("" if agrees_first else " with staleness='least' and slack='exact', or with staleness='uniform'")
    )
