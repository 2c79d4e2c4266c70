"""Proves on paper that the action lists of a pipeline keep the rules, without running anything.

What waits for what: ``F k`` needs the activation of ``F k`` from the stage before; ``B k`` needs its gradient, from
``B k`` of the stage after. ``U t`` needs ``B`` of the last microbatch of mini-batch t: on all stages, where they agree
on an update before they apply it; else on its own stage, and on the first one that shares parameters with it. Then they
agree later: before the first forward of a mini-batch on that about the mini-batch two before, or after a flush on that
about the one before; and in a drain on all. Receives are posted in order, sends never block. Replicas do the same, so
that what one may do in some order all may do in step. The rules, by the names that violations begin with:

* ``order``: every microbatch goes forward once and backward once, after it; forwards, backwards and updates in order.
* ``delay``: the weights that a microbatch is promised have been made when its forward comes: W_{max(t - delay, 0)}
  for the first ``held`` of mini-batch t, W_t for the others. (Update t makes W_{t+1}, so a gradient is ``delay``
  updates old, or fresh.) After a synchronous start of N mini-batches on W_t it is W_{max(t - delay, N)}.
* ``early``: an update comes right before the first forward that needs what it makes, drains apart. Before that nothing
  is gained, and what its reduction and its agreement could hide behind is lost.
* ``versions``: weights stay until their last backward; at any moment at most ``delay`` + 1 versions are needed.
* ``gradient``: an update comes when the stage has the whole gradient.
* ``in flight``: at most ``depth`` + 1 microbatches are between their forward and their backward.
* ``depth``: a backward has fewer forwards before it on the stage after, drains apart. With as many, neighbours are
  locked in step: each waits while the other works.
* ``room``: with replicas a forward comes between a complete gradient and its update, for the reduction to hide behind,
  unless a stage holds back no more microbatches than are under way. Without it nothing would be wrong, only slow.
* ``deadlock``: the lists can be run to their end.

Four mini-batches, after a synchronous start if there is one, tell about any number of them. What a rule looks at is
what is in flight on a stage, and by how many updates it is behind; both are the same after mini-batch 1 as after 2 and
after 3, so that 4, 5, ... are 3 again with other numbers, and the end of the run is a drain from that state. A drain
leaves nothing in flight, and at the end of the next mini-batch the state is the usual one again: so drains up to the
end of mini-batch 1 tell about those of any other. With accumulation, count the microbatches of all batches that share
an update.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from operator import le, lt

from lightning_asyncpp.core.schedule import Action, Kind, Schedule, StalenessRule

MINI_BATCHES = 4


@dataclass(frozen=True)
class OfDepth:
    """What a schedule's list may depend on, and nothing else; with how stages agree on updates.

    Attributes:
        depth: microbatches by which forwards run ahead of backwards.
        stage_rule: which weights they run on.
        agrees_first: whether all stages have agreed on an update before any applies it.
        shares_with: the first stage with a parameter of this one.
        stage: for messages.
    """

    depth: int
    stage_rule: StalenessRule
    agrees_first: bool = True
    shares_with: int | None = None
    stage: int = 0

    batch = Schedule.batch
    drain = Schedule.drain
    run = Schedule.run

    @property
    def pipeline_rule(self) -> StalenessRule:
        return replace(self.stage_rule, held=None)


@dataclass(frozen=True)
class StageList:
    """What one stage does, and what it is held to.

    Attributes:
        actions: in order.
        depth: microbatches by which its forwards may run ahead of its backwards.
        delay: updates between the weights of a gradient and those that it is applied to.
        synchronous_start: number of mini-batches at the beginning without delay; nobody steps ahead in it.
        held: how many microbatches of a mini-batch the delay is for; None: all.
        agrees_first: whether that holds of every update, and not only of those that end with a flush.
        shares_with: the first stage with a parameter of this one, whose gradient it needs, too.
        drains: numbers of microbatches, counted over the run, after which the pipeline is drained; and at the end.
    """

    actions: Sequence[Action]
    depth: int
    delay: int = 1
    synchronous_start: int = 0
    held: int | None = None
    agrees_first: bool = True
    shares_with: int | None = None
    drains: Collection[int] = ()

    @classmethod
    def of(
        cls, schedule: Schedule | OfDepth, microbatches: int, drains: Collection[int] = (), count: int = MINI_BATCHES
    ) -> StageList:
        rule, actions = schedule.stage_rule, schedule.run(count, microbatches, drains)
        agrees, shares = schedule.agrees_first, schedule.shares_with
        return cls(
            actions, schedule.depth, rule.delay, rule.synchronous_start, rule.held, agrees, shares, frozenset(drains)
        )

    def version(self, mini_batch: int, place: int) -> int:
        """Weights that a microbatch is promised, written down apart from the schedule's own rule."""
        if mini_batch < self.synchronous_start or (self.held is not None and place >= self.held):
            return mini_batch
        return max(mini_batch - self.delay, self.synchronous_start)

    def flushes(self, mini_batch: int) -> bool:
        """Whether all stages flush after a mini-batch."""
        return self.delay == 0 or mini_batch < self.synchronous_start

    def agrees_before(self, update: int) -> bool:
        """Whether all stages have agreed on an update before this one applies it."""
        return self.agrees_first or self.flushes(update)


def check(
    schedules: Sequence[Schedule | OfDepth],
    microbatches: int,
    num_replicas: int = 1,
    drains: Collection[int] = (),
) -> list[str]:
    """Check the lists that schedules make, of four mini-batches after a synchronous start: see above.

    Args:
        schedules: of each stage, the first stage first.
        microbatches: per update.
        num_replicas: of the pipeline; several need room for their reduction.
        drains: numbers of microbatches, counted over the run, after which the pipeline is drained.

    Returns:
        Violations in words; none if the schedules are right.
    """
    after = tuple(sorted(set(drains)))
    rules = [schedule.stage_rule for schedule in schedules]
    count = MINI_BATCHES + max(rule.synchronous_start for rule in rules)
    readings = [
        _reading_of(
            OfDepth(schedule.depth, _plain(rule, microbatches), schedule.agrees_first, schedule.shares_with),
            microbatches, count, after,
        )
        for schedule, rule in zip(schedules, rules)
    ]  # fmt: skip
    other = [(s.stage, _other_version(rule, reading, count)) for s, rule, reading in zip(schedules, rules, readings)]
    return [f"delay: stage {stage} {what}" for stage, what in other if what] + _violations(readings, num_replicas)


def check_lists(stages: Sequence[StageList], microbatches: int, num_replicas: int = 1) -> list[str]:
    """Check lists of actions, the first stage first; arguments and result as for :func:`check`."""
    return _violations([_Reading.of(stage, microbatches) for stage in stages], num_replicas)


@dataclass(eq=False)
class _Reading:
    """A stage's list, read from left to right.

    Every forward and every update begins a new step of the stage, in which the backwards that follow take part.
    """

    stage: StageList
    microbatches: int
    violations: dict[str, str] = field(default_factory=dict)  # rule -> the first violation
    forward_steps: list[int] = field(default_factory=list)  # of each microbatch
    backward_steps: list[int] = field(default_factory=list)  # of each microbatch
    forwards_before: list[int] = field(default_factory=list)  # the backward of each microbatch
    drained: set[int] = field(default_factory=set)  # steps that leave nothing in flight
    update_steps: list[int] = field(default_factory=list)  # of each mini-batch
    complete_steps: list[int] = field(default_factory=list)  # in which the gradient of each mini-batch was complete
    hurried: list[str] = field(default_factory=list)  # updates before which there is no room for a reduction
    agreements: list[tuple[int, int]] = field(default_factory=list)  # steps, and on which mini-batch before them

    @classmethod
    def of(cls, stage: StageList, microbatches: int) -> _Reading:
        reading = cls(stage, microbatches)
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
        # Microbatches are finished in order: the oldest weights needed are those of the next backward.
        newest, oldest = len(self.update_steps), self._version(len(self.backward_steps))
        if newest - oldest > (0 if self.stage.held == 0 else self.stage.delay):
            self._note("versions", f"after {action} the versions W_{oldest} to W_{newest} are needed at once")

    def _forward(self, k: int) -> None:
        if k != len(self.forward_steps):
            self._note("order", f"F{k} where F{len(self.forward_steps)} is due")
        newest = len(self.update_steps)
        if self._version(k) > newest:
            self._note("delay", f"F{k} needs W_{self._version(k)}, and the newest weights are W_{newest}")
        self.agreements += [(self._step + 1, t) for t in _agreed_before(self.stage, k, self.microbatches)]
        self.forward_steps.append(self._step + 1)
        in_flight = len(self.forward_steps) - len(self.backward_steps)
        if in_flight > self.stage.depth + 1:
            self._note("in flight", f"{in_flight} microbatches at F{k}, where the depth is {self.stage.depth}")

    def _backward(self, k: int) -> None:
        if k != len(self.backward_steps):
            self._note("order", f"B{k} where B{len(self.backward_steps)} is due")
        if k >= len(self.forward_steps):
            self._note("order", f"B{k} before F{k}")
        self.backward_steps.append(self._step)
        self.forwards_before.append(len(self.forward_steps))
        if len(self.backward_steps) == len(self.forward_steps):
            self.drained.add(self._step)
        if len(self.backward_steps) % self.microbatches == 0:
            self.complete_steps.append(self._step)

    def _update(self, t: int) -> None:
        if t != len(self.update_steps):
            self._note("order", f"U{t} where U{len(self.update_steps)} is due")
        if t >= len(self.complete_steps):
            self._note("gradient", f"U{t} before B{(t + 1) * self.microbatches - 1}")
        elif self.complete_steps[t] == self._step and len(self.forward_steps) > len(self.backward_steps):
            # If nothing is in flight, this is a drain, which waits anyway.
            self.hurried.append(f"U{t} follows the end of its gradient without a forward between")
        following = len(self.forward_steps)
        if self._version(following) <= t and following not in {*self.stage.drains, self._num_forwards}:
            self._note("early", f"U{t} before F{following}, which needs W_{self._version(following)}")
        if self.stage.agrees_before(t):
            self.agreements.append((self._step + 1, t))
        self.update_steps.append(self._step + 1)

    def _finish(self) -> None:
        counts = len(self.forward_steps), len(self.backward_steps), len(self.update_steps) * self.microbatches
        if len(set(counts)) > 1:
            self._note("order", f"{counts[0]} forwards, {counts[1]} backwards, updates with {counts[2]} of them")

    @property
    def _step(self) -> int:
        return len(self.forward_steps) + len(self.update_steps)

    @cached_property
    def _num_forwards(self) -> int:
        return sum(action.kind is Kind.FORWARD for action in self.stage.actions)

    def _version(self, k: int) -> int:
        return self.stage.version(*divmod(k, self.microbatches))

    @property
    def promises_room(self) -> bool:
        """Whether there is to be a forward between a complete gradient and its update."""
        held = self.stage.held
        return self.stage.delay > 0 and (held is None or min(held, self.microbatches) > self.stage.depth)

    def _note(self, rule: str, what: str) -> None:
        self.violations.setdefault(rule, what)


@lru_cache(maxsize=4096)
def _reading_of(schedule: OfDepth, microbatches: int, mini_batches: int, drains: tuple[int, ...]) -> _Reading:
    """A schedule's list depends on its depth and its rule alone, so one stands for all that share them."""
    return _Reading.of(StageList.of(schedule, microbatches, drains, mini_batches), microbatches)


def _plain(rule: StalenessRule, microbatches: int) -> StalenessRule:
    """The rule itself, whatever a subclass makes of it; to hold back more than there are is to hold back all."""
    held = None if rule.held is None or rule.held >= microbatches else rule.held
    return StalenessRule(rule.delay, rule.synchronous_start, held)


@lru_cache(maxsize=4096)
def _other_version(rule: StalenessRule, reading: _Reading, mini_batches: int) -> str:
    """The first microbatch for which a rule names other weights than are promised; empty if there is none."""
    for t in range(mini_batches):
        for place in range(reading.microbatches):
            promised, named = reading.stage.version(t, place), rule.version(t, place)
            if named != promised:
                return f"runs microbatch {place} of mini-batch {t} on W_{named}, not on W_{promised}"
    return ""


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
        hurried = ((s, reading.hurried) for s, reading in enumerate(readings) if reading.promises_room)
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
    step; within a step first what began it, the first stage first, then the backwards by microbatch, the last stage
    first.
    """
    complete = [max(steps) for steps in zip(*(reading.complete_steps for reading in readings))]
    return all(_neighbours_in_step(before, after) for before, after in pairwise(readings)) and all(
        _agrees_in_step(reading, tuple(complete)) and _shares_in_step(reading, readings) for reading in readings
    )


def _agrees_in_step(reading: _Reading, complete: tuple[int, ...]) -> bool:
    return all(complete[t] < step for step, t in reading.agreements if t < len(complete))


def _shares_in_step(reading: _Reading, readings: Sequence[_Reading]) -> bool:
    other = reading.stage.shares_with
    return other is None or all(map(lt, readings[other].complete_steps, reading.update_steps))


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
    """Actions of other stages that an action waits for, and of its own where an update needs them."""
    own, count = readings[stage].stage, readings[stage].microbatches
    everywhere = range(len(readings))
    if action.kind is Kind.BACKWARD:
        return [(stage + 1, action)] if stage + 1 < len(readings) else []
    if action.kind is Kind.FORWARD:
        agreed = [(s, _last(t, count)) for t in _agreed_before(own, action.index, count) for s in everywhere]
        return agreed + ([(stage - 1, action)] if stage > 0 else [])
    shared = [] if own.shares_with is None else [own.shares_with]
    return [
        (s, _last(action.index, count)) for s in (everywhere if own.agrees_before(action.index) else [stage, *shared])
    ]


def _agreed_before(stage: StageList, k: int, microbatches: int) -> list[int]:
    """Mini-batches that all stages must have agreed about before a forward."""
    t, place = divmod(k, microbatches)
    agreed = -1
    if place == 0:
        agreed = t - 1 if stage.flushes(t - 1) else t - 2
    if k in stage.drains:
        agreed = t - 1
    return [agreed] if agreed >= 0 else []


def _last(mini_batch: int, microbatches: int) -> Action:
    return Action(Kind.BACKWARD, (mini_batch + 1) * microbatches - 1)
