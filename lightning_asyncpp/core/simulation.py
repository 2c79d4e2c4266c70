"""Simulation of schedules, with given times of forwards, backwards, updates and messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from lightning_asyncpp.core.schedule import Action, Kind, Schedule
from lightning_asyncpp.core.trace import Span, utilisation

Duration: TypeAlias = float | Callable[[int, int], float]
"""Time: a constant, or a function of the stage and the microbatch (or mini-batch), counted over the run."""


class DeadlockError(RuntimeError):
    """Every stage that has not finished waits for another stage."""


def simulate(
    schedules: Sequence[Schedule],
    mini_batches: int,
    microbatches: int,
    forward: Duration = 1.0,
    backward: Duration = 2.0,
    hop: float = 0.0,
    update: Duration = 0.0,
    reduction: Duration = 0.0,
    transfer: Callable[[int], float] = lambda stage: 0.0,
) -> list[list[Span]]:
    """Run the action lists of all stages.

    Args:
        schedules: schedule of each stage, in order.
        mini_batches: number of mini-batches.
        microbatches: number of microbatches per mini-batch.
        forward: time of a forward.
        backward: time of a backward.
        hop: latency of a message between two stages; both stages go on meanwhile. The control message of an update
            (:class:`.PipelineSum`) is summed from the last stage to the first, which sends the sum to all. A stage
            that steps ahead (:meth:`.Schedule.steps_ahead`) needs the sum of mini-batch t only before mini-batch t + 2.
        update: time of an update.
        reduction: time from a stage's last backward of a mini-batch until its gradients are reduced over replicas. The
            stage goes on meanwhile.
        transfer: stage -> time for which an activation or gradient occupies the link to the next stage, before the hop.
            Each direction carries one message at a time. Control messages do not occupy links.

    Returns:
        Spans of each stage.

    Raises:
        DeadlockError: the stages wait for each other.
    """
    todo = [schedule.run(mini_batches, microbatches)[::-1] for schedule in schedules]
    lanes: list[list[Span]] = [[] for _ in schedules]
    lengths: dict[Kind, Duration] = {Kind.FORWARD: forward, Kind.BACKWARD: backward, Kind.UPDATE: update}
    progress = _Progress(schedules, microbatches, hop, reduction, transfer)
    while any(todo):
        moved = False
        for stage, actions in enumerate(todo):
            while actions and (ready := progress.ready(stage, actions[-1])) is not None:
                action = actions.pop()
                start = max(ready, lanes[stage][-1].end if lanes[stage] else 0.0)
                end = start + _length(lengths[action.kind], stage, action.index)
                lanes[stage].append(Span(action.kind, action.index, start, end))
                progress.note(stage, action, end)
                moved = True
        if not moved:
            raise DeadlockError(f"stages wait for each other: {[str(actions[-1]) for actions in todo if actions]}")
    return lanes


@dataclass(frozen=True)
class Pace:
    """Speed of a schedule over many mini-batches; with flushes it includes each mini-batch's warmup and cooldown.

    Attributes:
        step: time per mini-batch.
        work: for each stage, share of the time in forwards and backwards.
        busy: for each stage, share of the time in forwards, backwards and updates.
    """

    step: float
    work: tuple[float, ...]
    busy: tuple[float, ...]


_FIRST, _LAST = 3, 7
"""Two mini-batches after the initial warmup; the time between their ends is measured."""


def pace_of(
    schedules: Sequence[Schedule],
    microbatches: int,
    forward: Duration,
    backward: Duration,
    hop: float = 0.0,
    update: Duration = 0.0,
    reduction: Duration = 0.0,
    transfer: Callable[[int], float] = lambda stage: 0.0,
) -> Pace:
    """Return the pace of simulated mini-batches, without a synchronous start (initial mini-batches without delay).

    Arguments as for :func:`simulate`.
    """
    late = [replace(s, pipeline_rule=replace(s.pipeline_rule, synchronous_start=0)) for s in schedules]
    lanes = simulate(late, _LAST + 2, microbatches, forward, backward, hop, update, reduction, transfer)
    ends = {span.index: span.end for span in lanes[0] if span.kind is Kind.BACKWARD}
    start, end = (ends[(t + 1) * microbatches - 1] for t in (_FIRST, _LAST))
    if end <= start:
        return Pace(0.0, (0.0,) * len(lanes), (0.0,) * len(lanes))
    updates = [
        sum(max(0.0, min(s.end, end) - max(s.start, start)) for s in lane if s.kind is Kind.UPDATE) for lane in lanes
    ]
    work = tuple(utilisation(lane, start, end) for lane in lanes)
    busy = tuple(share + spent / (end - start) for share, spent in zip(work, updates))
    return Pace((end - start) / (_LAST - _FIRST), work, busy)


def _length(duration: Duration, stage: int, index: int) -> float:
    return duration(stage, index) if callable(duration) else duration


@dataclass
class _Progress:
    """Actions done and messages arrived so far; arguments as for :func:`simulate`."""

    schedules: Sequence[Schedule]
    microbatches: int
    hop: float
    reduction: Duration
    transfer: Callable[[int], float]
    ends: dict[tuple[Kind, int, int], float] = field(default_factory=dict)  # (kind, stage, index) -> end
    arrivals: dict[tuple[Kind, int, int], float] = field(default_factory=dict)  # (kind, sending stage, index) -> time
    free: dict[tuple[Kind, int], float] = field(default_factory=dict)  # (direction, link) -> time when it is free

    @property
    def num_stages(self) -> int:
        return len(self.schedules)

    def note(self, stage: int, action: Action, end: float) -> None:
        """Record the end of an action, and send its result."""
        self.ends[action.kind, stage, action.index] = end
        link = stage if action.kind is Kind.FORWARD else stage - 1
        if action.kind is not Kind.UPDATE and 0 <= link < self.num_stages - 1:
            sent = max(end, self.free.get((action.kind, link), 0.0)) + self.transfer(link)
            self.free[action.kind, link] = sent
            self.arrivals[action.kind, stage, action.index] = sent + self.hop

    def ready(self, stage: int, action: Action) -> float | None:
        """Return the time at which all that an action waits for has arrived; None if not known yet."""
        if action.kind is Kind.FORWARD:
            arrived = self.arrivals.get((Kind.FORWARD, stage - 1, action.index)) if stage > 0 else 0.0
            t, place = divmod(action.index, self.microbatches)
            if place or t < 2 or not self.schedules[stage].steps_ahead(t - 2):
                return arrived
            agreed = self._agreed(stage, t - 2)
            return None if arrived is None or agreed is None else max(arrived, agreed)
        if action.kind is Kind.BACKWARD:
            is_last = stage == self.num_stages - 1
            return 0.0 if is_last else self.arrivals.get((Kind.BACKWARD, stage + 1, action.index))
        schedule = self.schedules[stage]
        if not schedule.steps_ahead(action.index):
            return self._agreed(stage, action.index)
        own, other = self._reduced(stage, action.index), schedule.shares_with
        if other is None or other == stage or own is None:
            return own
        shared = self._reduced(other, action.index)
        return None if shared is None else max(own, shared + self.hop)

    def _agreed(self, stage: int, mini_batch: int) -> float | None:
        """Return the time at which a stage receives the sum of the control messages; None if not known yet."""
        total = 0.0
        for other in reversed(range(self.num_stages)):
            if (reduced := self._reduced(other, mini_batch)) is None:
                return None
            total = max(total + self.hop if other < self.num_stages - 1 else 0.0, reduced)
        return total + (self.hop if stage > 0 else 0.0)

    def _reduced(self, stage: int, mini_batch: int) -> float | None:
        """Return the time at which a stage's gradient has been reduced over replicas; None if not known yet."""
        end = self.ends.get((Kind.BACKWARD, stage, (mini_batch + 1) * self.microbatches - 1))
        return None if end is None else end + _length(self.reduction, stage, mini_batch)
