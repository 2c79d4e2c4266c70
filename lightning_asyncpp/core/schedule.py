"""Order of forwards, backwards and updates on a stage: without a flush, or 1F1B with a flush per mini-batch.

Microbatches are counted over the whole run: with ``m`` per mini-batch, microbatch ``k`` belongs to mini-batch
``t = k // m``. ``lookahead`` is the number of extra microbatches in flight, which hide latency. Stage s of P keeps its
forwards ``depth(s)`` microbatches ahead of its backwards:

    depth(s) = b (1 + q) + (b (r + 1)) // P,    b = P - 1 - s,    q, r = divmod(lookahead, P - 1).

The depth is P - 1 + lookahead on the first stage and decreases strictly from stage to stage. So the next stage reaches
backward k after fewer forwards than this stage, and when this stage waits for the gradient, the next stage is already
computing it. In the warmup a stage runs forwards until it is ``depth(s)`` ahead. In the steady state it runs one
backward per forward. In the cooldown of a flush it runs the remaining backwards (:meth:`Schedule.drain`).

If the depths of two neighbours differ by one, the latency of the hop between them is exposed. Each further microbatch
of difference hides a part of it. Exposed latencies of consecutive hops add up, so the lookahead is spread evenly: a
lookahead of P - 1 adds one microbatch of difference to each of the P - 1 hops.

Without a flush, a stage runs the first ``h`` microbatches of a mini-batch on the weights before the newest update, and
the later ones on the newest weights (:func:`num_stale_microbatches`). ``h`` is at least ``depth(s)``, the number of
microbatches that start before the previous mini-batch's gradient is complete. If ``h`` is the whole mini-batch, this is
PipeDream-2BW (Narayanan et al., ICML 2021).
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
    """Action of a stage: forward ``F k`` or backward ``B k`` of microbatch k, or update ``U t`` of mini-batch t."""

    kind: Kind
    index: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.index}"


def depth(stage: int, num_stages: int, lookahead: int) -> int:
    """Return the number of microbatches by which the forwards of ``stage`` run ahead of its backwards.

    Without lookahead this is Megatron's ``num_warmup_microbatches``.
    """
    behind = num_stages - 1 - stage
    everywhere, rest = divmod(lookahead, max(num_stages - 1, 1))
    return behind * (1 + everywhere) + behind * (rest + 1) // num_stages


def largest_lookahead(num_stages: int, microbatches: int, num_replicas: int) -> int:
    """Return the largest lookahead of an asynchronous pipeline; negative if not even 0 fits.

    The forwards of the first stage can run at most ``microbatches`` microbatches ahead of its backwards. With replicas
    the maximum is one less, so that the gradient reduction overlaps with a microbatch.
    """
    return microbatches - (1 if num_replicas > 1 else 0) - (num_stages - 1)


def num_stale_microbatches(
    stage: int, num_stages: int, lookahead: int, staleness: Staleness, slack: Slack
) -> int | None:
    """Return the number of leading microbatches per mini-batch that run on the weights before the newest update.

    With ``"uniform"`` these are all microbatches; with ``"least"``, the first ``depth(s) + slack``; with slack
    ``"exact"``, the first ``depth(0)`` on every stage. After ``depth(0)`` microbatches all stages know the previous
    gradient's norm.

    Returns:
        Number h, which may exceed the number of microbatches in a mini-batch; None for all.
    """
    if staleness == "uniform":
        return None
    return depth(0, num_stages, lookahead) if slack == "exact" else depth(stage, num_stages, lookahead) + slack


def agrees_first(staleness: Staleness, slack: Slack) -> bool:
    """Return whether all stages agree on an update before any of them applies it.

    With the slack ``"exact"`` every stage runs ``depth(0)`` microbatches on the older weights. After them the
    previous gradient is complete on the first stage, too, so its norm over all stages is known before any stage steps.
    """
    return staleness == "uniform" or slack == "exact"


@dataclass(frozen=True)
class StalenessRule:
    """Rule for the weight versions of microbatches, and for when updates are due.

    Update t makes W_{t+1}. The first N mini-batches are a synchronous start: all of their microbatches run on W_t. Of a
    later mini-batch t, the first ``num_stale`` microbatches run, forward and backward, on W_{max(t - delay, N)}, the
    others on W_t.

    Attributes:
        delay: age, in updates, of the weights of the ``num_stale`` microbatches: 0 or 1.
        synchronous_start: number N of initial mini-batches without delay, each with a flush. It is 1 if stages clip
            with the norm of the previous mini-batch, since the first mini-batch has no previous one.
        num_stale: number of delayed microbatches per mini-batch; None: all, as in PipeDream-2BW.
    """

    delay: int = 1
    synchronous_start: int = 0
    num_stale: int | None = None

    def version(self, mini_batch: int, place: int = 0) -> int:
        """Return version v of the weights W_v for microbatch number ``place`` of mini-batch t."""
        is_stale = self.num_stale is None or place < self.num_stale
        if mini_batch < self.synchronous_start or not is_stale:
            return mini_batch
        return max(mini_batch - self.delay, self.synchronous_start)

    def staleness(self, microbatches: int) -> float:
        """Return the age phi of a mini-batch's gradient, in updates, as a mean over its microbatches."""
        if self.num_stale is None or self.num_stale >= microbatches:
            return self.delay
        return self.delay * self.num_stale / microbatches if self.num_stale else 0

    @property
    def num_versions(self) -> int:
        """Maximum number of weight versions alive at the same time."""
        return 1 if self.num_stale == 0 else 1 + self.delay

    def all_at_newest(self, mini_batch: int) -> bool:
        """Return whether all microbatches of mini-batch t run on W_t, the newest weights (those before update t)."""
        return self.version(mini_batch) == mini_batch

    def staleness_of(self, mini_batch: int, microbatches: int) -> float:
        """Return the age of mini-batch t's gradient, for the optimizer; 0 in a synchronous start."""
        return 0 if mini_batch < self.synchronous_start else self.staleness(microbatches)

    def updates_behind(self, mini_batch: int) -> int:
        """Return the number of outstanding updates after mini-batch t has run; 0 after a flush."""
        return 0 if mini_batch < self.synchronous_start or self.num_stale == 0 else self.delay

    def flushes(self, mini_batch: int) -> bool:
        """Return whether mini-batch t ends with a flush."""
        return self.updates_behind(mini_batch) == 0

    def updates_due(self, mini_batch: int) -> int:
        """Return the number of updates, from the start of the run, that are due after mini-batch t has run."""
        return mini_batch + 1 - self.updates_behind(mini_batch)


@dataclass(frozen=True)
class Schedule:
    """Order of forwards, backwards and updates on one stage, and their weight versions.

    Attributes:
        stage: index of the stage.
        num_stages: number of stages P.
        lookahead: extra microbatches in flight. They hide latency, cost activation memory, and with ``"least"`` make
            gradients older.
        pipeline_rule: rule of the whole pipeline, for flushes and for what all stages agree on. Its ``num_stale`` is
            None, since that number belongs to a stage: see :attr:`stage_rule`.
        staleness: choice of the microbatches that run on the older weights; see :func:`num_stale_microbatches`.
        slack: with ``"least"``, number of microbatches beyond the minimum.
        shares_with: first stage linked to this one by a chain of shared parameters; None if there is none. That stage
            completes the parameter's gradient last, so this stage runs as many microbatches on the older weights as
            that stage.
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
        """Rule of this stage's weight versions."""
        if self.pipeline_rule.delay == 0:
            return self.pipeline_rule
        stage = self.stage if self.shares_with is None else self.shares_with
        num_stale = num_stale_microbatches(stage, self.num_stages, self.lookahead, self.staleness, self.slack)
        return replace(self.pipeline_rule, num_stale=num_stale)

    @cached_property
    def agrees_first(self) -> bool:
        """Whether all stages agree on an update before any of them applies it; see :func:`agrees_first`."""
        return agrees_first(self.staleness, self.slack)

    @property
    def depth(self) -> int:
        """Number of microbatches by which this stage's forwards run ahead of its backwards."""
        return depth(self.stage, self.num_stages, self.lookahead)

    def steps_ahead(self, mini_batch: int) -> bool:
        """Return whether this stage applies the update of mini-batch t before all stages have agreed on it."""
        return not self.agrees_first and self.pipeline_rule.updates_behind(mini_batch) > 0

    def batch(self, first: int, count: int, oldest: int, mini_batch: int = 0, begin: int = 0) -> list[Action]:
        """Return the forwards of ``count`` new microbatches, with the backwards and the update that are due among them.

        Args:
            first: number of the first new microbatch.
            count: number of new microbatches.
            oldest: microbatch whose backward is due next.
            mini_batch: mini-batch t of the new microbatches; update t - 1 may be due among them.
            begin: first microbatch of mini-batch t.
        """
        depth, num_stale, actions = self.depth, self.stage_rule.num_stale, list[Action]()
        for k in range(first, first + count):
            if num_stale and k - begin == num_stale and mini_batch and self.stage_rule.updates_behind(mini_batch - 1):
                actions.append(Action(Kind.UPDATE, mini_batch - 1))
            actions.append(Action(Kind.FORWARD, k))
            while k + 1 - oldest > depth:
                actions.append(Action(Kind.BACKWARD, oldest))
                oldest += 1
        return actions

    def drain(self, oldest: int, end: int) -> list[Action]:
        """Return the backwards of all microbatches in flight, ``oldest`` to ``end - 1``."""
        return [Action(Kind.BACKWARD, k) for k in range(oldest, end)]

    def run(self, mini_batches: int, microbatches: int, drains: Collection[int] = ()) -> list[Action]:
        """Return all actions of a run, for planners, simulators and proofs.

        The engine runs them in the same order, except that it first runs one microbatch alone, as a check, and that a
        stage that steps ahead (:meth:`steps_ahead`) yields ``U t`` again when it reads the totals of all ranks.

        Args:
            mini_batches: number of mini-batches.
            microbatches: number of microbatches per mini-batch.
            drains: counts of microbatches from the start of the run. After each count, and at the end, the pipeline is
                drained: all backwards in flight run, and all updates of complete mini-batches are applied.
        """
        actions: list[Action] = []
        oldest = updates = 0
        end = mini_batches * microbatches
        for begin, done in pairwise(sorted({*range(0, end + 1, microbatches), *(k for k in drains if 0 < k < end)})):
            t = begin // microbatches
            batch = self.batch(begin, done - begin, oldest, t, t * microbatches)
            actions += [
                a for a in batch if a.kind is not Kind.UPDATE or a.index >= updates
            ]  # a drain may have applied it
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
