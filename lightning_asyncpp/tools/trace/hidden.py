"""How much of the way from a complete gradient to its update nobody waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_asyncpp.pipeline.schedule import Kind
from lightning_asyncpp.pipeline.trace import Beside, Wait
from lightning_asyncpp.tools.trace.run import RankTrace


@dataclass(frozen=True)
class Underway:
    """Reductions and agreements of a stage.

    Attributes:
        seconds: how long they took.
        exposed: how long the stage waited for them.
    """

    seconds: float
    exposed: float

    @property
    def hidden(self) -> float | None:
        """Share that the stage did not wait for; None if none was under way."""
        return 1 - self.exposed / self.seconds if self.seconds > 0 else None


def underway(rank: RankTrace, ranks: Sequence[RankTrace]) -> Underway | None:
    """What was under way for a stage; None if agreements were not recorded.

    It begins with the stage's last backward of a mini-batch. Nothing can be agreed on before the slowest stage has
    ended its own and the replicas' reduction is over; from then on only what the stage waits is known to be needed.

    Args:
        rank: the stage.
        ranks: all stages of all replicas.
    """
    if not any(span.kind is Wait.AGREEMENT for other in ranks for span in other.spans):
        return None
    waits = _waits(rank)
    complete, others = _complete(rank), [_complete(other) for other in ranks]
    reduced = {span.index: span.end for span in rank.spans if span.kind is Beside.REDUCE}
    seconds = exposed = 0.0
    for t in waits.keys() & complete.keys():
        possible = max(reduced.get(t, 0.0), *(ends.get(t, 0.0) for ends in others))
        began, waited = waits[t]
        seconds += max(0.0, min(possible, began) - complete[t]) + waited
        exposed += waited
    return Underway(seconds, exposed)


def _waits(rank: RankTrace) -> dict[int, tuple[float, float]]:
    """When the stage wanted to know the outcome for each update, and for how long in all it waited for it."""
    waits = {span.index: (span.start, 0.0) for span in rank.spans if span.kind is Kind.UPDATE}
    for span in rank.spans:
        if span.kind is Wait.AGREEMENT:
            began, waited = waits.get(span.index, (span.start, 0.0))
            waits[span.index] = (min(began, span.start), waited + span.end - span.start)
    return waits


def _complete(rank: RankTrace) -> dict[int, float]:
    """When the last backward of each mini-batch ended."""
    ends: dict[int, float] = {}
    for span in rank.spans:
        if span.kind is Kind.BACKWARD:
            t = rank.mini_batch(span)
            ends[t] = max(ends.get(t, span.end), span.end)
    return ends
