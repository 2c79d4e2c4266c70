"""The order of forwards, backwards and updates on a stage: without a flush, or 1F1B with a flush per mini-batch.

Microbatches are counted over the whole run: with ``m`` of them per mini-batch, microbatch ``k`` belongs to
mini-batch ``t = k // m``. A stage keeps its forwards ``depth`` microbatches ahead of its backwards,

    depth(s) = b (1 + q) + b (r + 1) // P,    b = P - 1 - s,    q, r = divmod(lookahead, P - 1),

which strictly decreases with the stage, so that every gradient a stage waits for is already under way, and is P - 1 +
lookahead on the first one. Warmup is the forwards until a stage is ``depth`` ahead, the steady state one backward per
forward, cooldown the backwards of a flush (:meth:`Schedule.drain`). Where the depths of neighbours differ by one, the
latency of the hop between them is exposed; each microbatch of difference beyond that overlaps with it. Exposed hops in
a row add up, so the lookahead is spread evenly over the pipeline: every P - 1 of it give each hop one more.

Without a flush, a stage runs the first ``h`` microbatches of a mini-batch on the weights before the newest update, and
the others on the newest ones (:func:`held_back`). All of them is PipeDream-2BW (Narayanan et al., ICML 2021); no fewer
than ``depth(s)`` can be, since so many are under way before the gradient of the mini-batch before is complete.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import Literal

Staleness = Literal["uniform", "least"]
Slack = int | Literal["exact"]


class Kind(str, Enum):
    """Kind of an action of a stage."""

    FORWARD = "F"
    BACKWARD = "B"
    UPDATE = "U"


@dataclass(frozen=True)
class Action:
    """One step of a stage: ``F k`` and ``B k`` count microbatches, ``U t`` counts mini-batches."""

    kind: Kind
    index: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.index}"


def depth(stage: int, num_stages: int, lookahead: int) -> int:
    """Number of microbatches by which the forwards of ``stage`` run ahead of its backwards."""
    behind = num_stages - 1 - stage
    everywhere, rest = divmod(lookahead, max(num_stages - 1, 1))
    return behind * (1 + everywhere) + behind * (rest + 1) // num_stages


def largest_lookahead(num_stages: int, microbatches: int, num_replicas: int) -> int:
    """Largest lookahead of an asynchronous pipeline; negative if not even 0 fits.

    The first stage may run ``microbatches`` ahead, one less with replicas: their gradient reduction needs somewhere to
    hide.
    """
    return microbatches - (1 if num_replicas > 1 else 0) - (num_stages - 1)


def held_back(stage: int, num_stages: int, lookahead: int, staleness: Staleness, slack: Slack) -> int | None:
    """Return the number of leading microbatches per mini-batch that run on the weights before the newest update.

    ``"uniform"``: all. ``"least"``: ``depth(s) + slack``, or ``depth(0)`` on every stage for the slack ``"exact"``: by
    then the first stage has the gradient of the mini-batch before, so its norm over all stages is known.

    Returns:
        the number h; None for all, however many there are. A mini-batch may have fewer than h.
    """
    if staleness == "uniform":
        return None
    return depth(0, num_stages, lookahead) if slack == "exact" else depth(stage, num_stages, lookahead) + slack


def agrees_first(staleness: Staleness, slack: Slack) -> bool:
    """Return whether all stages have agreed on an update before any of them applies it.

    With the slack ``"exact"`` every stage holds back ``depth(0)`` microbatches. When it has run their forwards, the
    first stage has its gradient, so the norm over all stages is known before any of them steps.
    """
    return staleness == "uniform" or slack == "exact"


@dataclass(frozen=True)
class StalenessRule:
    """Rule for the weights that microbatches run on and for the updates that are due; nothing else computes these.

    The settings create it. The engine, the session and the queue of updates use it; the queue also asks whether a
    stage steps ahead of the others (:meth:`Schedule.steps_ahead`). For a checkpoint,
    :class:`lightning_asyncpp.core.weights.WeightVersions` tracks by itself which version is alive beside the newest.

    Update t makes W_{t+1}. The first ``held`` microbatches of mini-batch t run, forward and backward, on
    W_{max(t - delay, N)}, the others on W_t; so do all in a synchronous start of N mini-batches. Mini-batch N runs on
    W_N as a whole, as 0 does on W_0 without such a start.

    Attributes:
        delay: updates between the weights of a gradient and the weights that it is applied to: 1, or 0 throughout.
        synchronous_start: number N of mini-batches at the beginning that end with a flush and have no delay: 1 where
            stages clip by the norm of the mini-batch before, which the very first has not.
        held: how many microbatches of a mini-batch the delay is for; None: all, as in PipeDream-2BW.
    """

    delay: int = 1
    synchronous_start: int = 0
    held: int | None = None

    def version(self, mini_batch: int, place: int = 0) -> int:
        """Number v of the weights W_v that microbatch number ``place`` of mini-batch t runs on."""
        is_held = self.held is None or place < self.held
        if mini_batch < self.synchronous_start or not is_held:
            return mini_batch
        return max(mini_batch - self.delay, self.synchronous_start)

    def staleness(self, microbatches: int) -> float:
        """Return the mean age phi of a mini-batch's gradient, in updates, over its microbatches."""
        if self.held is None or self.held >= microbatches:
            return self.delay
        return self.delay * self.held / microbatches if self.held else 0

    @property
    def num_versions(self) -> int:
        """Maximum number of weight versions alive at a time."""
        return 1 if self.held == 0 else 1 + self.delay

    def at_newest(self, mini_batch: int) -> bool:
        """Return whether mini-batch t runs on the weights that its own update changes: no delay, or not yet."""
        return self.version(mini_batch) == mini_batch

    def staleness_of(self, mini_batch: int, microbatches: int) -> float:
        """Return the age that the optimizer is told of mini-batch t: :meth:`staleness`, 0 in a synchronous start."""
        return 0 if mini_batch < self.synchronous_start else self.staleness(microbatches)

    def updates_behind(self, mini_batch: int) -> int:
        """Return the number of outstanding updates after mini-batch t was run: none after a flush."""
        return 0 if mini_batch < self.synchronous_start or self.held == 0 else self.delay

    def flushes(self, mini_batch: int) -> bool:
        """Return whether mini-batch t ends with a flush."""
        return self.updates_behind(mini_batch) == 0

    def updates_due(self, mini_batch: int) -> int:
        """Return the number of updates, from the start of the run, that are due after mini-batch t was run."""
        return mini_batch + 1 - self.updates_behind(mini_batch)


@dataclass(frozen=True)
class Schedule:
    """The order of forwards, backwards and updates on one stage, and the weights that they run on.

    Attributes:
        stage: position in the pipeline, 0 first.
        num_stages: number of stages P.
        lookahead: extra microbatches in flight; hides latency, costs activation memory, and with the least staleness
            freshness.
        pipeline_rule: by when all stages have agreed on an update, and when all flush.
        staleness: how many microbatches run on the older weights: :func:`held_back`.
        slack: with ``"least"``, how many more than must.
        shares_with: the first stage that shares a parameter with this one, or this one: it has the gradient of that
            parameter last, so this stage holds back as many microbatches as it does.
    """

    stage: int
    num_stages: int
    lookahead: int = 0
    pipeline_rule: StalenessRule = StalenessRule()
    staleness: Staleness = "uniform"
    slack: Slack = 0
    shares_with: int | None = None

    @cached_property
    def stage_rule(self) -> StalenessRule:
        """Rule for the weights of this stage."""
        if self.pipeline_rule.delay == 0:
            return self.pipeline_rule
        stage = self.stage if self.shares_with is None else self.shares_with
        held = held_back(stage, self.num_stages, self.lookahead, self.staleness, self.slack)
        return replace(self.pipeline_rule, held=held)

    @cached_property
    def agrees_first(self) -> bool:
        """Whether all stages have agreed on an update before any of them applies it: :func:`agrees_first`."""
        return agrees_first(self.staleness, self.slack)

    @property
    def depth(self) -> int:
        """Number of microbatches by which forwards run ahead of backwards here."""
        return depth(self.stage, self.num_stages, self.lookahead)

    def steps_ahead(self, mini_batch: int) -> bool:
        """Return whether this stage applies the update of mini-batch t before all have agreed on it."""
        held, behind = self.stage_rule.held, self.pipeline_rule.updates_behind(mini_batch)
        return held is not None and not self.agrees_first and behind > 0

    def batch(self, first: int, count: int, oldest: int, mini_batch: int = 0, begin: int = 0) -> list[Action]:
        """Actions that bring ``count`` microbatches from ``first`` on under way.

        Args:
            first: index of the first new microbatch.
            count: number of new microbatches.
            oldest: the microbatch whose backward is due next.
            mini_batch: t, which they belong to; in the middle of it the update of the one before may be due.
            begin: its first microbatch.
        """
        depth, held, actions = self.depth, self.stage_rule.held, list[Action]()
        for k in range(first, first + count):
            if held and k - begin == held and mini_batch and self.stage_rule.updates_behind(mini_batch - 1):
                actions.append(Action(Kind.UPDATE, mini_batch - 1))
            actions.append(Action(Kind.FORWARD, k))
            while k + 1 - oldest > depth:
                actions.append(Action(Kind.BACKWARD, oldest))
                oldest += 1
        return actions

    def drain(self, oldest: int, end: int) -> list[Action]:
        """Backwards of everything in flight: microbatches ``oldest`` to ``end - 1``."""
        return [Action(Kind.BACKWARD, k) for k in range(oldest, end)]

    def run(self, mini_batches: int, microbatches: int, drains: Collection[int] = ()) -> list[Action]:
        """The whole run, as planners, simulators and proofs want it.

        The engine runs the same order, except that it runs the very first microbatch alone, as a check.

        Args:
            mini_batches: how many.
            microbatches: per mini-batch.
            drains: numbers of microbatches, counted over the run, after which what is in flight is finished, and then
                all updates of complete mini-batches are applied, as at the end of the run.
        """
        actions: list[Action] = []
        oldest = updates = 0
        end = mini_batches * microbatches
        for begin, done in pairwise(sorted({*range(0, end + 1, microbatches), *(k for k in drains if 0 < k < end)})):
            t = begin // microbatches
            batch = self.batch(begin, done - begin, oldest, t, t * microbatches)
            actions += [a for a in batch if a.kind is not Kind.UPDATE or a.index >= updates]  # a drain has applied some
            updates = max([updates, *(a.index + 1 for a in batch if a.kind is Kind.UPDATE)])
            oldest = max(oldest, done - self.depth)
            complete, over = divmod(done, microbatches)
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
