"""Proves on paper that the action lists of a pipeline keep the rules, without running anything.

What waits for what: ``F k`` needs the activation of ``F k`` from the stage before; ``B k`` needs its gradient, from
``B k`` of the stage after. ``U t`` needs ``B`` of the last microbatch of mini-batch t: on all stages, where they agree
on an update before they apply it; else on its own stage, and on the first one that shares parameters with it. Then they
agree later: before the first forward of a mini-batch on that about the mini-batch two before, or after a flush on that
about the one before; and in a drain on all. Receives are posted in order, sends never block. Replicas do the same, so
that what one may do in some order all may do in step. The rules, by the names that violations begin with:

* ``order``: every microbatch goes forward once and backward once, after it; forwards, backwards and updates in order.
* ``delay``: the weights that a microbatch is promised have been made when its forward comes: W_{max(t - delay, 0)}
  for the first ``num_stale`` of mini-batch t, W_t for the others. (Update t makes W_{t+1}, so a gradient is ``delay``
  updates old, or fresh.) After a synchronous start of N mini-batches on W_t it is W_{max(t - delay, N)}.
* ``early``: an update comes right before the first forward that needs what it makes, drains apart. Before that nothing
  is gained, and what its reduction and its agreement could hide behind is lost.
* ``versions``: weights stay until their last backward; at any moment at most ``delay`` + 1 versions are needed.
* ``gradient``: an update comes when the stage has the whole gradient.
* ``in flight``: at most ``depth`` + 1 microbatches are between their forward and their backward.
* ``depth``: a backward has fewer forwards before it on the stage after, drains apart. With as many, neighbours are
  locked in step: each waits while the other works.
* ``room``: with replicas a forward comes between a complete gradient and its update, for the reduction to hide behind,
  unless a stage has no more stale microbatches than are under way. Without it nothing would be wrong, only slow.
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
from dataclasses import dataclass, field
from itertools import pairwise

from lightning_asyncpp.core.schedule import Action, Kind, Schedule

MINI_BATCHES = 4


@dataclass(frozen=True)
class StageList:
    """What one stage does, and what it is held to.

    Attributes:
        actions: in order.
        depth: microbatches by which its forwards may run ahead of its backwards.
        delay: updates between the weights of a gradient and those that it is applied to.
        synchronous_start: number of mini-batches at the beginning without delay; nobody steps ahead in it.
        num_stale: how many microbatches of a mini-batch the delay is for; None: all.
        agrees_first: whether all stages have agreed on an update before this one applies it, also without a flush.
        shares_with: the first stage with a parameter of this one, whose gradient it needs, too.
        drains: numbers of microbatches, counted over the run, after which the pipeline is drained; and at the end.
    """

    actions: Sequence[Action]
    depth: int
    delay: int = 1
    synchronous_start: int = 0
    num_stale: int | None = None
    agrees_first: bool = True
    shares_with: int | None = None
    drains: Collection[int] = ()

    @classmethod
    def of(
        cls, schedule: Schedule, microbatches: int, drains: Collection[int] = (), count: int = MINI_BATCHES
    ) -> StageList:
        rule, actions = schedule.stage_rule, schedule.run(count, microbatches, drains)
        agrees, shares = schedule.agrees_first, schedule.shares_with
        return cls(actions, schedule.depth, rule.delay, rule.synchronous_start, rule.num_stale, agrees, shares, drains)

    def version(self, mini_batch: int, place: int) -> int:
        """Weights that a microbatch is promised, written down apart from the schedule's own rule."""
        if mini_batch < self.synchronous_start or (self.num_stale is not None and place >= self.num_stale):
            return mini_batch
        return max(mini_batch - self.delay, self.synchronous_start)

    def flushes(self, mini_batch: int) -> bool:
        """Whether all stages flush after a mini-batch."""
        return self.delay == 0 or mini_batch < self.synchronous_start

    def agrees_before(self, update: int) -> bool:
        """Whether all stages have agreed on an update before this one applies it."""
        return self.agrees_first or self.flushes(update)

    def agreed_before(self, k: int, microbatches: int) -> int:
        """Number of mini-batches that all stages must have agreed on before a forward."""
        t, place = divmod(k, microbatches)
        if k in self.drains:
            return t
        return 0 if place else t - (not self.flushes(t - 1))


def check(
    schedules: Sequence[Schedule], microbatches: int, num_replicas: int = 1, drains: Collection[int] = ()
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
    count = MINI_BATCHES + max(schedule.stage_rule.synchronous_start for schedule in schedules)
    lists = [StageList.of(schedule, microbatches, drains, count) for schedule in schedules]
    other = [_other_version(*pair, microbatches, count) for pair in zip(schedules, lists)]
    return [*filter(None, other), *check_lists(lists, microbatches, num_replicas)]


def _other_version(schedule: Schedule, stage: StageList, microbatches: int, mini_batches: int) -> str:
    """The first microbatch for which a rule names other weights than are promised; empty if there is none."""
    for t in range(mini_batches):
        for place in range(microbatches):
            promised, named = stage.version(t, place), schedule.stage_rule.version(t, place)
            if named != promised:
                where = f"stage {schedule.stage} runs microbatch {place} of mini-batch {t}"
                return f"delay: {where} on W_{named}, not on W_{promised}"
    return ""


def check_lists(stages: Sequence[StageList], microbatches: int, num_replicas: int = 1) -> list[str]:
    """Check lists of actions, the first stage first; arguments and result as for :func:`check`."""
    readings = [_Reading(stage, microbatches) for stage in stages]
    found = [f"{rule}: stage {s}: {what}" for s, r in enumerate(readings) for rule, what in r.violations.items()]
    for stage, (before, after) in enumerate(pairwise(readings)):
        pairs = zip(before.forwards_before, after.forwards_before)
        locked = [k for k, (own, other) in enumerate(pairs) if own <= other and own not in before.drained]
        if locked:
            found.append(f"depth: B{locked[0]} has as many forwards before it on stage {stage + 1} as on stage {stage}")
    if num_replicas > 1:
        found += [f"room: stage {s}: {r.hurried[0]}" for s, r in enumerate(readings) if r.promises_room and r.hurried]
    return found + _deadlock(stages, microbatches)


@dataclass(eq=False)
class _Reading:
    """A stage's list, read from left to right."""

    stage: StageList
    microbatches: int
    forwards: int = 0
    updates: int = 0
    violations: dict[str, str] = field(default_factory=dict)  # rule -> the first violation
    forwards_before: list[int] = field(default_factory=list)  # the backward of each microbatch
    drained: set[int] = field(default_factory=set)  # numbers of forwards after which nothing is left in flight
    hurried: list[str] = field(default_factory=list)  # updates before which there is no room for a reduction

    def __post_init__(self) -> None:
        read = {Kind.FORWARD: self._forward, Kind.BACKWARD: self._backward, Kind.UPDATE: self._update}
        self._all_forwards = sum(action.kind is Kind.FORWARD for action in self.stage.actions)
        for action in self.stage.actions:
            read[action.kind](action.index)
            # Microbatches are finished in order: the oldest weights needed are those of the next backward.
            oldest = self._version(self._backwards)
            if self.updates - oldest > (0 if self.stage.num_stale == 0 else self.stage.delay):
                self._note("versions", f"after {action} the versions W_{oldest} to W_{self.updates} are needed at once")
        counts = self.forwards, self._backwards, self.updates * self.microbatches
        if len(set(counts)) > 1:
            self._note("order", f"{counts[0]} forwards, {counts[1]} backwards, updates with {counts[2]} of them")

    @property
    def promises_room(self) -> bool:
        """Whether there is to be a forward between a complete gradient and its update."""
        num_stale = self.stage.num_stale
        return self.stage.delay > 0 and (num_stale is None or min(num_stale, self.microbatches) > self.stage.depth)

    @property
    def _backwards(self) -> int:
        return len(self.forwards_before)

    def _forward(self, k: int) -> None:
        if k != self.forwards:
            self._note("order", f"F{k} where F{self.forwards} is due")
        if self._version(k) > self.updates:
            self._note("delay", f"F{k} needs W_{self._version(k)}, and the newest weights are W_{self.updates}")
        self.forwards += 1
        in_flight = self.forwards - self._backwards
        if in_flight > self.stage.depth + 1:
            self._note("in flight", f"{in_flight} microbatches at F{k}, where the depth is {self.stage.depth}")

    def _backward(self, k: int) -> None:
        if k != self._backwards:
            self._note("order", f"B{k} where B{self._backwards} is due")
        if k >= self.forwards:
            self._note("order", f"B{k} before F{k}")
        self.forwards_before.append(self.forwards)
        if self._backwards == self.forwards:
            self.drained.add(self.forwards)

    def _update(self, t: int) -> None:
        last = (t + 1) * self.microbatches - 1  # backward of the mini-batch
        if t != self.updates:
            self._note("order", f"U{t} where U{self.updates} is due")
        if last >= self._backwards:
            self._note("gradient", f"U{t} before B{last}")
        elif self.forwards_before[last] == self.forwards > self._backwards:
            # If nothing is in flight, this is a drain, which waits anyway.
            self.hurried.append(f"U{t} follows the end of its gradient without a forward between")
        following = self.forwards
        if self._version(following) <= t and following not in {*self.stage.drains, self._all_forwards}:
            self._note("early", f"U{t} before F{following}, which needs W_{self._version(following)}")
        self.updates += 1

    def _version(self, k: int) -> int:
        return self.stage.version(*divmod(k, self.microbatches))

    def _note(self, rule: str, what: str) -> None:
        self.violations.setdefault(rule, what)


def _deadlock(stages: Sequence[StageList], microbatches: int) -> list[str]:
    """Run the lists, every stage as far as it gets, until none gets further."""
    todo = [list(stage.actions)[::-1] for stage in stages]
    forwards, backwards = ([0] * len(stages) for _ in range(2))

    def may_run(stage: int, kind: Kind, k: int) -> bool:
        own = stages[stage]
        if kind is Kind.FORWARD:
            return (stage == 0 or forwards[stage - 1] > k) and (
                min(backwards) >= own.agreed_before(k, microbatches) * microbatches
            )
        if kind is Kind.BACKWARD:
            return stage + 1 == len(stages) or backwards[stage + 1] > k
        others = [] if own.shares_with is None else [backwards[own.shares_with]]
        needed = backwards if own.agrees_before(k) else [backwards[stage], *others]
        return min(needed) >= (k + 1) * microbatches

    left = -1
    while left != (left := sum(map(len, todo))):
        for stage, actions in enumerate(todo):
            while actions and may_run(stage, actions[-1].kind, actions[-1].index):
                kind = actions.pop().kind
                forwards[stage] += kind is Kind.FORWARD
                backwards[stage] += kind is Kind.BACKWARD
    stuck = [f"stage {stage} at {actions[-1]}" for stage, actions in enumerate(todo) if actions]
    return [f"deadlock: {', '.join(stuck)}"] if stuck else []
