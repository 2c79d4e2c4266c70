"""Does the run keep the promise? Every micro-batch runs on the weights that its stage's rule names, W_{t-1} or W_t."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_asyncpp.core.recording.trace import Span
from lightning_asyncpp.core.schedule import Kind
from lightning_asyncpp.tools.trace.recorded_run import RankTrace

_SHOWN = 5


@dataclass(frozen=True)
class Versions:
    """Which weights a stage worked with.

    Attributes:
        versions: lowest and highest W_v that a micro-batch ran on; None if they were not recorded.
        staleness: updates between the weights of a gradient and those that it is applied to -> number of micro-batches.
        violations: what breaks the promise, in words; at most a handful.
        violated: how often it is broken.
        stale_share: share of the micro-batches on weights before the newest, where the delay has begun; None if there
            are none, or versions were not recorded.
    """

    versions: tuple[int, int] | None
    staleness: dict[int, int]
    violations: Sequence[str]
    violated: int
    stale_share: float | None = None

    @property
    def in_words(self) -> str:
        """How many updates old gradients were: in a steady state, their mean where only some are."""
        if self.stale_share is not None and 0 < self.stale_share < 1:
            return f"{self.stale_share:.2f}"
        return ", ".join(f"{updates}" for updates in sorted(self.staleness)) or "not recorded"


def check_versions(rank: RankTrace) -> Versions:
    """Compare the weights of every micro-batch and every update with what the schedule promises."""
    forwards = {s.index: s for s in rank.spans if s.kind is Kind.FORWARD}
    backwards = {s.index: s for s in rank.spans if s.kind is Kind.BACKWARD}
    updates = {s.index: s for s in rank.spans if s.kind is Kind.UPDATE}
    recorded = [s for s in (*forwards.values(), *backwards.values()) if s.version >= 0]
    problems: list[str] = []
    for span in recorded:
        problems += _problem_of_version(rank, span)
    problems += _problems_of_pairs(forwards, backwards)
    problems += _problems_of_order(rank, forwards, backwards, updates)
    seen = [span.version for span in recorded]
    staleness = Counter(rank.mini_batch(s) - s.version for s in forwards.values() if s.version >= 0)
    return Versions(
        (min(seen), max(seen)) if seen else None, dict(staleness), problems[:_SHOWN], len(problems),
        _stale_share(rank, forwards.values()),
    )  # fmt: skip


def _stale_share(rank: RankTrace, forwards: Iterable[Span]) -> float | None:
    start = rank.meta.synchronous_start
    ages = [t - span.version for span in forwards if span.version >= 0 and (t := rank.mini_batch(span)) > start]
    return sum(age > 0 for age in ages) / len(ages) if ages else None


def _problem_of_version(rank: RankTrace, span: Span) -> list[str]:
    t = rank.mini_batch(span)
    promised = _promised(rank, span)
    if span.version == promised:
        return []
    what = "forward" if span.kind is Kind.FORWARD else "backward"
    return [
        f"{rank.name}: {what} {span.index} of mini-batch {t} ran on W{span.version}, not on W{promised}:"
        f" its gradient is {t - span.version} updates old, not {t - promised}"
    ]


def _promised(rank: RankTrace, span: Span) -> int:
    return rank.meta.stage_rule.version(rank.mini_batch(span), rank.place_of(span.index))


def _problems_of_pairs(forwards: dict[int, Span], backwards: dict[int, Span]) -> list[str]:
    return [
        f"micro-batch {k}: forward on W{forward.version}, backward on W{backwards[k].version}"
        for k, forward in forwards.items()
        if k in backwards and -1 not in (forward.version, backwards[k].version)
        and forward.version != backwards[k].version
    ]  # fmt: skip


def _problems_of_order(
    rank: RankTrace, forwards: dict[int, Span], backwards: dict[int, Span], updates: dict[int, Span]
) -> list[str]:
    """What the times say, whatever versions were noted: weights exist before they are used, gradients before updates.

    An update without a span was left out (a gradient that is not finite), or lies outside of the recording.
    """
    problems = []
    for span in forwards.values():
        t = rank.mini_batch(span)
        made_by = updates.get(_promised(rank, span) - 1)
        if made_by is not None and made_by.end > span.start:
            problems.append(
                f"{rank.name}: forward {span.index} of mini-batch {t} began before update {made_by.index} had ended,"
                " which makes its weights"
            )
    for span in backwards.values():
        update = updates.get(rank.mini_batch(span))
        if update is not None and update.start < span.end:
            problems.append(
                f"{rank.name}: update {update.index} began before backward {span.index} had ended, which belongs to it"
            )
    wrong = [u for u in updates.values() if u.version not in (-1, u.index + 1)]
    return problems + [f"{rank.name}: update {u.index} made W{u.version}, not W{u.index + 1}" for u in wrong]
