"""Schedules as pure lists of actions: PipeDream-2BW without a flush, and 1F1B with one per mini-batch.

Micro-batches are counted over the whole run: with ``m`` of them per mini-batch, micro-batch ``k`` belongs to
mini-batch ``t = k // m``. A stage keeps its forwards ``depth`` micro-batches ahead of its backwards,

    depth(s) = (P - 1 - s) + (P - 1 - s) * (lookahead + 1) // P,

which strictly decreases with the stage, so that every gradient a stage waits for is already under way. A hop between
neighbours whose depths differ by one has no slack: its latency is waited for. Where they differ by two, the gradient is
under way while something else is computed. What a run of hops without slack costs grows with its length, so the extra
micro-batches are spread evenly over the pipeline.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import pairwise


class Kind(str, Enum):
    """What a stage does."""

    FORWARD = "F"
    BACKWARD = "B"
    UPDATE = "U"


@dataclass(frozen=True)
class Action:
    """One step of a stage: ``F k`` and ``B k`` count micro-batches, ``U t`` counts mini-batches."""

    kind: Kind
    index: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.index}"


def depth(stage: int, num_stages: int, lookahead: int) -> int:
    """Number of micro-batches by which the forwards of ``stage`` run ahead of its backwards.

    More lookahead than P - 1 has nothing left to hide.
    """
    behind = num_stages - 1 - stage
    return behind + behind * (min(lookahead, num_stages - 1) + 1) // num_stages


def largest_lookahead(num_stages: int, micro_batches: int, num_replicas: int) -> int:
    """Largest useful lookahead of an asynchronous pipeline; negative if not even 0 fits.

    The first stage may run ``micro_batches`` ahead, one less with replicas: their gradient reduction needs somewhere to
    hide.
    """
    room = micro_batches - (1 if num_replicas > 1 else 0) - (num_stages - 1)
    return min(room, num_stages - 1)


@dataclass(frozen=True)
class StalenessRule:
    """Which weights mini-batches run on, and which updates are due: nothing else in a pipeline computes that.

    The settings make it. The engine, the session and the queue of updates ask it, the last one also whether a stage
    steps ahead of the others (:meth:`Schedule.steps_ahead`). Which version is alive beside the newest, for a
    checkpoint, :class:`lightning_asyncpp.pipeline.weights.WeightVersions` knows by itself.

    Update t makes W_{t+1}. Mini-batch t runs, forward and backward, on W_{max(t - delay, N)}; before it, in a
    synchronous start of N mini-batches, on W_t. Mini-batches N and N + 1 both run on W_N, as 0 and 1 do on W_0 without
    such a start.

    Attributes:
        delay: updates between the weights of a gradient and the weights that it is applied to: 1 (PipeDream-2BW) or 0.
        synchronous_start: number N of mini-batches at the beginning that end with a flush and have no delay.
    """

    delay: int = 1
    synchronous_start: int = 0

    def version(self, mini_batch: int) -> int:
        """Number v of the weights W_v that mini-batch t runs on."""
        return mini_batch if self.in_start(mini_batch) else max(mini_batch - self.delay, self.synchronous_start)

    @property
    def num_versions(self) -> int:
        """How many weight versions are needed at a time, at most."""
        return 1 + self.delay

    def in_start(self, mini_batch: int) -> bool:
        """Whether mini-batch t belongs to the synchronous start."""
        return mini_batch < self.synchronous_start

    def begins_at(self, mini_batch: int) -> bool:
        """Whether the delay begins with mini-batch t, after a synchronous start."""
        return mini_batch == self.synchronous_start > 0

    def at_newest(self, mini_batch: int) -> bool:
        """Whether mini-batch t runs on the weights that its own update is applied to: no delay, or not yet."""
        return self.version(mini_batch) == mini_batch

    def updates_behind(self, mini_batch: int) -> int:
        """How many mini-batches' updates are outstanding when mini-batch t was run: none after a flush."""
        return 0 if self.in_start(mini_batch) else self.delay

    def flushes(self, mini_batch: int) -> bool:
        """Whether mini-batch t ends with a flush."""
        return self.updates_behind(mini_batch) == 0

    def updates_due(self, mini_batch: int) -> int:
        """How many updates, from the first one of the run on, are due when mini-batch t was run."""
        return mini_batch + 1 - self.updates_behind(mini_batch)


@dataclass(frozen=True)
class Schedule:
    """The order of forwards and backwards on one stage, and the weights that they run on.

    Attributes:
        stage: position in the pipeline, 0 first.
        num_stages: number of stages P.
        lookahead: extra micro-batches in flight; hides latency, costs activation memory, never changes the delay.
        pipeline_rule: when all stages have agreed on an update, and when all flush.
        fresh_last_stage: whether the last stage runs without delay: it applies an update before all have agreed on it.
    """

    stage: int
    num_stages: int
    lookahead: int = 0
    pipeline_rule: StalenessRule = StalenessRule()
    fresh_last_stage: bool = False

    @cached_property
    def stage_rule(self) -> StalenessRule:
        """Which weights this stage runs on: by the pipeline's rule, but for a fresh last stage."""
        is_fresh = self.fresh_last_stage and self.stage == self.num_stages - 1
        return replace(self.pipeline_rule, delay=0) if is_fresh else self.pipeline_rule

    @property
    def depth(self) -> int:
        """Number of micro-batches by which forwards run ahead of backwards here."""
        return depth(self.stage, self.num_stages, self.lookahead)

    def steps_ahead(self, mini_batch: int) -> bool:
        """Whether this stage applies the update of mini-batch t ahead of the others."""
        return self.stage_rule.updates_behind(mini_batch) < self.pipeline_rule.updates_behind(mini_batch)

    def batch(self, first: int, count: int, oldest: int) -> Iterator[Action]:
        """Actions that bring ``count`` micro-batches from ``first`` on under way.

        Args:
            first: index of the first new micro-batch.
            count: number of new micro-batches.
            oldest: the micro-batch whose backward is due next.
        """
        depth = self.depth
        for k in range(first, first + count):
            yield Action(Kind.FORWARD, k)
            while k + 1 - oldest > depth:
                yield Action(Kind.BACKWARD, oldest)
                oldest += 1

    def drain(self, oldest: int, end: int) -> Iterator[Action]:
        """Backwards of everything in flight: micro-batches ``oldest`` to ``end - 1``."""
        return (Action(Kind.BACKWARD, k) for k in range(oldest, end))

    def run(self, mini_batches: int, micro_batches: int, drains: Collection[int] = ()) -> list[Action]:
        """The whole run, as planners, simulators and proofs want it: the engine executes the same order.

        Args:
            mini_batches: how many.
            micro_batches: per mini-batch.
            drains: numbers of micro-batches, counted over the run, after which what is in flight is finished, and then
                all updates of complete mini-batches are applied, as at the end of the run.
        """
        actions: list[Action] = []
        oldest = updates = 0
        end = mini_batches * micro_batches
        for begin, done in pairwise(sorted({*range(0, end + 1, micro_batches), *(k for k in drains if 0 < k < end)})):
            actions += self.batch(begin, done - begin, oldest)
            oldest = max(oldest, done - self.depth)
            complete, over = divmod(done, micro_batches)
            if over == 0:
                if self.pipeline_rule.flushes(complete - 1):
                    actions += self.drain(oldest, done)
                    oldest = done
                due = self.stage_rule.updates_due(complete - 1)
                actions += [Action(Kind.UPDATE, t) for t in range(updates, due)]
                updates = max(updates, due)
            if done in drains or done == end:
                actions += self.drain(oldest, done)
                actions += [Action(Kind.UPDATE, t) for t in range(updates, complete)]
                oldest, updates = done, complete
        return actions
