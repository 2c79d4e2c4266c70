"""When the pipeline fills and when it is drained: waiting for a neighbour means something else then.

An episode is a stretch without a drain: a whole asynchronous run if nothing drains it, a mini-batch with a flush.
It ends where the first stage has nothing in flight. Until a stage begins its first backward of an episode the pipeline
fills (warm-up); from the end of its last forward until all stages have ended their last backward it drains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_asyncpp.pipeline.schedule import Kind
from lightning_asyncpp.pipeline.trace import Span
from lightning_asyncpp.tools.trace.run import RankTrace

Interval = tuple[float, float]


@dataclass(frozen=True)
class Episode:
    """Micro-batches between two drains.

    Attributes:
        first, last: of its micro-batches.
        cut_before: whether the recording began when it was under way.
        cut_after: whether the recording ended before it was drained.
    """

    first: int
    last: int
    cut_before: bool = False
    cut_after: bool = False


@dataclass(frozen=True)
class Phases:
    """Of one stage.

    Attributes:
        warm_up: times in which the pipeline fills.
        drain: times in which it is drained.
    """

    warm_up: Sequence[Interval]
    drain: Sequence[Interval]


def find_episodes(stages: Sequence[RankTrace]) -> list[Episode]:
    """The episodes of a replica, from what its first recorded stage did."""
    spans = [span for span in stages[0].spans if span.kind in (Kind.FORWARD, Kind.BACKWARD)]
    forwards = [span.index for span in spans if span.kind is Kind.FORWARD]
    if not forwards:
        return []
    # A stage that keeps nothing in flight drains after every micro-batch, which means nothing.
    deep = stages[0].meta.stage < stages[0].meta.num_stages - 1
    episodes, first = [], forwards[0]
    back = {span.index for span in spans if span.kind is Kind.BACKWARD}
    cut_before = any(index < first for index in back)
    for k in _drained_before(spans) if deep else []:
        episodes.append(Episode(first, k - 1, cut_before))
        first, cut_before = k, False
    episodes.append(Episode(first, forwards[-1], cut_before, forwards[-1] not in back))
    return episodes


def _drained_before(spans: Sequence[Span]) -> list[int]:
    """Micro-batches whose forward began when nothing was in flight, but the first one."""
    found = []
    newest_forward = newest_backward = None
    for span in sorted(spans, key=lambda span: span.start):
        if span.kind is Kind.BACKWARD:
            newest_backward = span.index
        else:
            if newest_forward is not None and newest_backward == newest_forward:
                found.append(span.index)
            newest_forward = span.index
    return found


def phases_of(stage: RankTrace, stages: Sequence[RankTrace], episodes: Sequence[Episode], end: float) -> Phases:
    """When the pipeline fills and drains, as ``stage`` sees it.

    Args:
        stage: one of ``stages``.
        stages: of the replica.
        episodes: of the replica.
        end: of the recording.
    """
    own_forward, own_backward = _times(stage, Kind.FORWARD), _times(stage, Kind.BACKWARD)
    ends = [_times(other, Kind.BACKWARD) for other in stages]
    warm_up: list[Interval] = []
    drain: list[Interval] = []
    filled_from = 0.0
    for episode in episodes:
        if not episode.cut_before and (begun := own_backward.get(episode.first)) is not None:
            warm_up.append((filled_from, begun.start))
        if episode.cut_after:
            continue
        last = [times[episode.last].end for times in ends if episode.last in times]
        drained = max(last, default=end)
        if (newest := own_forward.get(episode.last)) is not None and newest.end < drained:
            drain.append((newest.end, drained))
        filled_from = drained
    return Phases(warm_up, drain)


def _times(rank: RankTrace, kind: Kind) -> dict[int, Span]:
    return {span.index: span for span in rank.spans if span.kind is kind}
