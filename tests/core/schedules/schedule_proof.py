"""Static proof that the action lists of a pipeline keep the rules; no pipeline runs.

Dependencies: ``F k`` needs the activation from ``F k`` of the previous stage; ``B k`` needs its gradient, from ``B k``
of the next stage. ``U t`` needs ``B`` of the last microbatch of mini-batch t: on all stages if they agree on an update
before they apply it; otherwise on its own stage, and on the first stage that shares parameters with it. In this case
stages agree later: before the first forward of a mini-batch, on the update of the mini-batch two before, or of the one
before if that ended with a flush; and in a drain, on all updates. Receives are posted in order, and sends never block.
All replicas have the same lists, so if one replica can run an order, all can run it in step. Each violation begins with
the name of its rule:

* ``order``: every microbatch has one forward and then one backward; forwards, backwards and updates are in order.
* ``delay``: the weights promised to a microbatch exist before its forward: W_{max(t - delay, 0)} for the first
  ``num_stale`` microbatches of mini-batch t, W_t for the others. (Update t makes W_{t+1}, so a gradient is ``delay``
  updates old, or fresh.) After a synchronous start (N mini-batches on W_t), the former is W_{max(t - delay, N)}.
* ``early``: except in drains, an update comes right before the first forward that needs its weights. An earlier update
  gains nothing, and its reduction and its agreement overlap with less work.
* ``versions``: weights are kept until their last backward, and at most ``delay`` + 1 versions are needed at a time.
* ``gradient``: an update comes after the last backward of its mini-batch on the stage.
* ``in flight``: at most ``depth`` + 1 microbatches are between their forward and their backward.
* ``depth``: except in drains, fewer forwards come before a backward on the next stage than on this one. With equally
  many, neighbours run in lockstep: each waits while the other works.
* ``room``: with replicas, a forward comes between a complete gradient and its update, to overlap with the reduction,
  unless a stage has no more stale microbatches than its depth. Without that forward, the run is correct, but slow.
* ``deadlock``: the lists can be run to their end.

Four mini-batches, after a synchronous start if there is one, prove the rules for any number. Rules depend on the
microbatches in flight on a stage, and on the number of updates that it is behind. Both are the same after mini-batches
1, 2 and 3, so mini-batches 4, 5, ... repeat 3 with other numbers, and the end of the run is a drain from that state. A
drain leaves nothing in flight, and at the end of the next mini-batch the state is the usual one again, so drains up to
the end of mini-batch 1 cover all others. With accumulation, count the microbatches of all batches that share an update.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from lightning_asyncpp.core.schedule import Action, Kind, Schedule

MINI_BATCHES = 4


@dataclass(frozen=True)
class StageList:
    """Actions of one stage, and the properties that they must have.

    Attributes:
        actions: actions in order.
        depth: number of microbatches by which forwards may run ahead of backwards.
        delay: number of updates between the weights of a gradient and the weights to which it is applied.
        synchronous_start: number of initial mini-batches without delay, in which no stage steps ahead.
        num_stale: number of delayed microbatches per mini-batch; None: all.
        agrees_first: whether all stages agree on an update before this stage applies it, even without a flush.
        shares_with: first stage that shares a parameter with this one; updates here also need its gradient.
        drains: counts of microbatches from the start of the run, after which the pipeline is drained, as at the end.
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
        """Return the version of the weights promised to a microbatch, independently of the schedule's own rule."""
        if mini_batch < self.synchronous_start or (self.num_stale is not None and place >= self.num_stale):
            return mini_batch
        return max(mini_batch - self.delay, self.synchronous_start)

    def flushes(self, mini_batch: int) -> bool:
        """Return whether all stages flush after a mini-batch."""
        return self.delay == 0 or mini_batch < self.synchronous_start

    def agrees_before(self, update: int) -> bool:
        """Return whether all stages agree on an update before this stage applies it."""
        return self.agrees_first or self.flushes(update)

    def agreed_before(self, k: int, microbatches: int) -> int:
        """Return the number of mini-batches on whose updates all stages must have agreed before a forward."""
        t, place = divmod(k, microbatches)
        if k in self.drains:
            return t
        return 0 if place else t - (not self.flushes(t - 1))


def check(
    schedules: Sequence[Schedule], microbatches: int, num_replicas: int = 1, drains: Collection[int] = ()
) -> list[str]:
    """Check the lists that schedules make, with four mini-batches after a synchronous start; see the module docstring.

    Args:
        schedules: schedule of each stage, in order.
        microbatches: number of microbatches per update.
        num_replicas: number of replicas; with several, lists need room for the reduction.
        drains: counts of microbatches from the start of the run, after which the pipeline is drained.

    Returns:
        Messages of the violations; empty if there are none.
    """
    count = MINI_BATCHES + max(schedule.stage_rule.synchronous_start for schedule in schedules)
    lists = [StageList.of(schedule, microbatches, drains, count) for schedule in schedules]
    other = [_other_version(*pair, microbatches, count) for pair in zip(schedules, lists)]
    return [*filter(None, other), *check_lists(lists, microbatches, num_replicas)]


def _other_version(schedule: Schedule, stage: StageList, microbatches: int, mini_batches: int) -> str:
    """Return a message on the first microbatch whose rule names other weights than promised; empty if there is none."""
    for t in range(mini_batches):
        for place in range(microbatches):
            promised, named = stage.version(t, place), schedule.stage_rule.version(t, place)
            if named != promised:
                where = f"stage {schedule.stage} runs microbatch {place} of mini-batch {t}"
                return f"delay: {where} on W_{named}, not on W_{promised}"
    return ""


def check_lists(stages: Sequence[StageList], microbatches: int, num_replicas: int = 1) -> list[str]:
    """Check the lists of all stages, in order; arguments and result are those of :func:`check`."""
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
    """Check of a stage's list, from its first action to its last."""

    stage: StageList
    microbatches: int
    forwards: int = 0
    updates: int = 0
    violations: dict[str, str] = field(default_factory=dict)  # rule -> the first violation
    forwards_before: list[int] = field(default_factory=list)  # number of forwards before each backward
    drained: set[int] = field(default_factory=set)  # counts of forwards at which nothing was in flight
    hurried: list[str] = field(default_factory=list)  # messages on updates without room for a reduction

    def __post_init__(self) -> None:
        read = {Kind.FORWARD: self._forward, Kind.BACKWARD: self._backward, Kind.UPDATE: self._update}
        self._all_forwards = sum(action.kind is Kind.FORWARD for action in self.stage.actions)
        for action in self.stage.actions:
            read[action.kind](action.index)
            # Backwards are in order, so the oldest weights needed are those of the next backward.
            oldest = self._version(self._backwards)
            if self.updates - oldest > (0 if self.stage.num_stale == 0 else self.stage.delay):
                self._note("versions", f"after {action} the versions W_{oldest} to W_{self.updates} are needed at once")
        counts = self.forwards, self._backwards, self.updates * self.microbatches
        if len(set(counts)) > 1:
            self._note("order", f"{counts[0]} forwards, {counts[1]} backwards, updates with {counts[2]} of them")

    @property
    def promises_room(self) -> bool:
        """Whether a forward must come between a complete gradient and its update."""
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
        last = (t + 1) * self.microbatches - 1  # last microbatch of the mini-batch
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
    """Run every stage's list as far as possible until no stage can go on; return a message if actions are left."""
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
