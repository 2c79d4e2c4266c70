"""What the schedule could do at best with the stages as fast as they were: no messages, no updates, no framework."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_asyncpp.pipeline.schedule import Kind, Schedule, StalenessRule
from lightning_asyncpp.pipeline.trace import Span, utilisation
from lightning_asyncpp.tools.ideal import simulate
from lightning_asyncpp.tools.trace.phases import Episode
from lightning_asyncpp.tools.trace.run import RankTrace

_LEAD = 3  # mini-batches that are simulated around a piece of a run: the pipeline is as full as it was


@dataclass(frozen=True)
class Ideal:
    """The same actions without overheads.

    Attributes:
        seconds: how long they would take.
        utilisation: of each stage, first stage first.
    """

    seconds: float
    utilisation: Sequence[float]


def ideal_of(stages: Sequence[RankTrace], episodes: Sequence[Episode]) -> Ideal | None:
    """Run the schedule of a replica's recorded episodes with its stages' median times.

    Returns:
        None if a stage is missing, or did not run a forward and a backward.
    """
    meta = stages[0].meta
    times = [(_median(stage, Kind.FORWARD), _median(stage, Kind.BACKWARD)) for stage in stages]
    if len(stages) != meta.num_stages or any(None in pair for pair in times):
        return None
    forward, backward = [f or 0.0 for f, _ in times], [b or 0.0 for _, b in times]
    schedules = [
        Schedule(s.meta.stage, s.meta.num_stages, s.meta.lookahead, StalenessRule(s.meta.delay)) for s in stages
    ]
    seconds, busy = 0.0, [0.0] * len(stages)
    for episode in episodes:
        lanes, start, end = _run(episode, schedules, stages[0].micro_batches, forward, backward)
        seconds += end - start
        busy = [b + utilisation(lane, start, end) * (end - start) for b, lane in zip(busy, lanes)]
    return Ideal(seconds, [b / seconds for b in busy]) if seconds > 0 else None


def _run(
    episode: Episode, schedules: Sequence[Schedule], micro_batches: int, forward: list[float], backward: list[float]
) -> tuple[list[list[Span]], float, float]:
    """The lanes of an episode, and from when to when they stand for it; a flush ends each mini-batch by itself."""
    count = max(1, round((episode.last + 1 - episode.first) / micro_batches))
    before, after = _LEAD * episode.cut_before, _LEAD * episode.cut_after
    lanes = simulate(
        schedules,
        before + count + after,
        micro_batches,
        lambda stage, _: forward[stage],
        lambda stage, _: backward[stage],
    )
    begins = {span.index: span.start for span in lanes[0] if span.kind is Kind.FORWARD}
    ends = max(span.end for lane in lanes for span in lane)
    return lanes, begins[before * micro_batches], begins.get((before + count) * micro_batches, ends)


def _median(stage: RankTrace, kind: Kind) -> float | None:
    lengths = [span.end - span.start for span in stage.spans if span.kind is kind]
    return statistics.median(lengths) if lengths else None
