"""Proves on paper that the action lists of a pipeline keep the rules, without running anything.

What waits for what: ``F k`` needs the activation of ``F k`` from the stage before; ``B k`` needs its gradient, from
``B k`` of the stage after; ``U t`` needs the agreement of all stages, that is ``B`` of the last micro-batch of
mini-batch t on each of them. Receives are posted in order, sends never block. The rules, by the names that violations
begin with:

* ``order``: every micro-batch goes forward once and backward once, after it; forwards, backwards and updates in order.
* ``delay``: the weights W_{max(t - delay, 0)} of mini-batch t have been made when its forwards come. (Update t makes
  W_{t+1}, so its gradient is then ``delay`` updates old.) After a synchronous start of N mini-batches on W_t it is
  W_{max(t - delay, N)}.
* ``versions``: they stay until its last backward; at any moment at most ``delay`` + 1 versions are needed.
* ``gradient``: an update comes when the stage has the whole gradient.
* ``in flight``: at most ``depth`` + 1 micro-batches are between their forward and their backward.
* ``depth``: a backward has fewer forwards before it on the stage after, drains apart. With as many, neighbours are
  locked in step: each waits while the other works.
* ``room``: with replicas a forward comes between a complete gradient and its update, for the reduction to hide behind.
  Without it nothing would be wrong, only slow.
* ``deadlock``: the lists can be run to their end.

Four mini-batches, after a synchronous start if there is one, tell about any number of them. What a rule looks at is
what is in flight on a stage, and by how many updates it is behind; both are the same after mini-batch 1 as after 2 and
after 3, so that 4, 5, ... are 3 again with other numbers, and the end of the run is a drain from that state. A drain
leaves nothing in flight, and at the end of the next mini-batch the state is the usual one again: so drains up to the
end of mini-batch 1 tell about those of any other. With accumulation, count the micro-batches of all batches that share
an update.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from operator import le

from lightning_asyncpp.pipeline.schedule import Action, Kind, Schedule, StalenessRule

MINI_BATCHES = 4


@dataclass(frozen=True)
class StageList:
    """What one stage does, and what it is held to.

    Attributes:
        actions: in order.
        depth: micro-batches by which its forwards may run ahead of its backwards.
        delay: updates between the weights of a gradient and those that it is applied to. A last stage with less than
            the others steps ahead: it waits for their agreement about an older mini-batch.
        synchronous_start: number of mini-batches at the beginning without delay; nobody steps ahead in it.
    """

    actions: Sequence[Action]
    depth: int
    delay: int
    synchronous_start: int = 0

    def version(self, mini_batch: int) -> int:
        """Weights that a mini-batch is promised, written down apart from the schedule's own rule."""
        if mini_batch < self.synchronous_start:
            return mini_batch
        return max(mini_batch - self.delay, self.synchronous_start)


def check(
    schedules: Sequence[Schedule],
    micro_batches: int,
    num_replicas: int = 1,
    drains: Collection[int] = (),
    mini_batches: int | None = None,
) -> list[str]:
    """Check the lists that schedules make.

    Args:
        schedules: of each stage, the first stage first.
        micro_batches: per update.
        num_replicas: of the pipeline; several need room for their reduction.
        drains: numbers of micro-batches, counted over the run, after which the pipeline is drained.
        mini_batches: how many to look at; default: four, after a synchronous start; see above why they are enough.

    Returns:
        Violations in words; none if the schedules are right.
    """
    after = tuple(sorted(set(drains)))
    rules = [schedule.stage_rule for schedule in schedules]
    count = MINI_BATCHES + max(rule.synchronous_start for rule in rules) if mini_batches is None else mini_batches
    readings = [
        _reading_of(schedule.depth, rule.delay, rule.synchronous_start, micro_batches, count, after)
        for schedule, rule in zip(schedules, rules)
    ]
    violations = [
        f"delay: stage {s.stage} runs mini-batch {t} on W_{rule.version(t)}, not on W_{reading.stage.version(t)}"
        for s, rule, reading in zip(schedules, rules, readings)
        for t in range(count)
        if rule.version(t) != reading.stage.version(t)
    ]
    return violations + _violations(readings, num_replicas)


def check_lists(stages: Sequence[StageList], micro_batches: int, num_replicas: int = 1) -> list[str]:
    """Check lists of actions, the first stage first; arguments and result as for :func:`check`."""
    return _violations([_Reading.of(stage, micro_batches) for stage in stages], num_replicas)


@dataclass(eq=False)
class _Reading:
    """A stage's list, read from left to right.

    Every forward and every update begins a new step of the stage, in which the backwards that follow take part.
    """

    stage: StageList
    micro_batches: int
    violations: dict[str, str] = field(default_factory=dict)  # rule -> the first violation
    forward_steps: list[int] = field(default_factory=list)  # of each micro-batch
    backward_steps: list[int] = field(default_factory=list)  # of each micro-batch
    forwards_before: list[int] = field(default_factory=list)  # the backward of each micro-batch
    drained: set[int] = field(default_factory=set)  # steps that leave nothing in flight
    update_steps: list[int] = field(default_factory=list)  # of each mini-batch
    complete_steps: list[int] = field(default_factory=list)  # in which the gradient of each mini-batch was complete
    hurried: list[str] = field(default_factory=list)  # updates before which there is no room for a reduction

    @classmethod
    def of(cls, stage: StageList, micro_batches: int) -> _Reading:
        reading = cls(stage, micro_batches)
        for action in stage.actions:
            reading._read(action)
        reading._finish()
        return reading

    def _read(self, action: Action) -> None:
        if action.kind is Kind.FORWARD:
            self._forward(action.index)
        elif action.kind is Kind.BACKWARD:
            self._backward(action.index)
        else:
            self._update(action.index)
        # Micro-batches are finished in order: the oldest weights needed are those of the next backward.
        newest, oldest = len(self.update_steps), self._version(len(self.backward_steps))
        if newest - oldest > self.stage.delay:
            self._note("versions", f"after {action} the versions W_{oldest} to W_{newest} are needed at once")

    def _forward(self, k: int) -> None:
        if k != len(self.forward_steps):
            self._note("order", f"F{k} where F{len(self.forward_steps)} is due")
        newest = len(self.update_steps)
        if self._version(k) > newest:
            self._note("delay", f"F{k} needs W_{self._version(k)}, and the newest weights are W_{newest}")
        self.forward_steps.append(self._step + 1)
        in_flight = len(self.forward_steps) - len(self.backward_steps)
        if in_flight > self.stage.depth + 1:
            self._note("in flight", f"{in_flight} micro-batches at F{k}, where the depth is {self.stage.depth}")

    def _backward(self, k: int) -> None:
        if k != len(self.backward_steps):
            self._note("order", f"B{k} where B{len(self.backward_steps)} is due")
        if k >= len(self.forward_steps):
            self._note("order", f"B{k} before F{k}")
        self.backward_steps.append(self._step)
        self.forwards_before.append(len(self.forward_steps))
        if len(self.backward_steps) == len(self.forward_steps):
            self.drained.add(self._step)
        if len(self.backward_steps) % self.micro_batches == 0:
            self.complete_steps.append(self._step)

    def _update(self, t: int) -> None:
        if t != len(self.update_steps):
            self._note("order", f"U{t} where U{len(self.update_steps)} is due")
        if t >= len(self.complete_steps):
            self._note("gradient", f"U{t} before B{(t + 1) * self.micro_batches - 1}")
        elif self.complete_steps[t] == self._step and len(self.forward_steps) > len(self.backward_steps):
            # If nothing is in flight, this is a drain, which waits anyway.
            self.hurried.append(f"U{t} follows the end of its gradient without a forward between")
        self.update_steps.append(self._step + 1)

    def _finish(self) -> None:
        counts = len(self.forward_steps), len(self.backward_steps), len(self.update_steps) * self.micro_batches
        if len(set(counts)) > 1:
            self._note("order", f"{counts[0]} forwards, {counts[1]} backwards, updates with {counts[2]} of them")

    @property
    def _step(self) -> int:
        return len(self.forward_steps) + len(self.update_steps)

    def _version(self, k: int) -> int:
        return self.stage.version(k // self.micro_batches)

    def _note(self, rule: str, what: str) -> None:
        self.violations.setdefault(rule, what)


@lru_cache(maxsize=1024)
def _reading_of(
    depth: int, delay: int, synchronous_start: int, micro_batches: int, mini_batches: int, drains: tuple[int, ...]
) -> _Reading:
    """A schedule's list depends on its depth and its delays alone, so one stands for all that share them."""
    schedule = Schedule(0, depth + 1, pipeline_rule=StalenessRule(delay, synchronous_start))
    actions = schedule.run(mini_batches, micro_batches, drains)
    return _Reading.of(StageList(actions, depth, delay, synchronous_start), micro_batches)


def _violations(readings: Sequence[_Reading], num_replicas: int) -> list[str]:
    own = [
        f"{rule}: stage {s}: {what}" for s, reading in enumerate(readings) for rule, what in reading.violations.items()
    ]
    found = own + [
        f"depth: {locked} has as many forwards before it on stage {stage + 1} as on stage {stage}"
        for stage, (before, after) in enumerate(pairwise(readings))
        if (locked := _locked(before, after))
    ]
    if num_replicas > 1:
        hurried = ((s, reading.hurried) for s, reading in enumerate(readings) if reading.stage.delay)
        found += [f"room: stage {stage}: {updates[0]}" for stage, updates in hurried if updates]
    # Where the stages can go in step there is no deadlock; else running the lists decides.
    return found if not own and _in_step(readings) else found + _deadlocks(readings)


@lru_cache(maxsize=4096)
def _locked(before: _Reading, after: _Reading) -> str:
    """The first backward that locks neighbours in step; empty if there is none."""
    pairs = zip(before.forwards_before, after.forwards_before, before.backward_steps)
    locked = (k for k, (own, others, step) in enumerate(pairs) if own <= others and step not in before.drained)
    return next((f"B{k}" for k in locked), "")


def _in_step(readings: Sequence[_Reading]) -> bool:
    """Whether nobody waits for what another stage does in a later step of its own.

    Then there is no deadlock, for the actions can be put in an order in which each comes after what it waits for: by
    step; within a step first what began it, the first stage first, then the backwards by micro-batch, the last stage
    first.
    """
    complete = [max(steps) for steps in zip(*(reading.complete_steps for reading in readings))]
    return all(_neighbours_in_step(before, after) for before, after in pairwise(readings)) and all(
        complete[agreed] < step
        for stage, reading in enumerate(readings)
        for t, step in enumerate(reading.update_steps)
        if 0 <= (agreed := _agreed(readings, stage, t)) < len(complete)
    )


@lru_cache(maxsize=4096)
def _neighbours_in_step(before: _Reading, after: _Reading) -> bool:
    return all(map(le, before.forward_steps, after.forward_steps)) and all(
        map(le, after.backward_steps, before.backward_steps)
    )


def _deadlocks(readings: Sequence[_Reading]) -> list[str]:
    """Run the lists, every stage as far as it gets, until none gets further."""
    todo = [list(reading.stage.actions)[::-1] for reading in readings]
    done: set[tuple[int, Action]] = set()
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(todo):
            while actions and all(needed in done for needed in _needed(readings, stage, actions[-1])):
                done.add((stage, actions.pop()))
                moved = True
    stuck = [f"stage {stage} at {actions[-1]}" for stage, actions in enumerate(todo) if actions]
    return [f"deadlock: {', '.join(stuck)}"] if stuck else []


def _needed(readings: Sequence[_Reading], stage: int, action: Action) -> list[tuple[int, Action]]:
    """Actions of other stages that an action waits for."""
    if action.kind is Kind.FORWARD:
        return [(stage - 1, action)] if stage > 0 else []
    if action.kind is Kind.BACKWARD:
        return [(stage + 1, action)] if stage + 1 < len(readings) else []
    agreed = _agreed(readings, stage, action.index)
    last = Action(Kind.BACKWARD, (agreed + 1) * readings[stage].micro_batches - 1)
    return [(other, last) for other in range(len(readings))] if agreed >= 0 else []


def _agreed(readings: Sequence[_Reading], stage: int, update: int) -> int:
    """The mini-batch that all stages must have agreed about before an update; negative if there is none."""
    own = readings[stage].stage
    ahead = max(reading.stage.delay for reading in readings) - own.delay
    return update - (ahead if update >= own.synchronous_start else 0)
