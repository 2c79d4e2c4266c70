"""Where the time of a stage went: when the pipeline fills and drains, one cause for every moment, and what was hidden.

An episode is a stretch without a drain: a whole asynchronous run if nothing drains it, a mini-batch with a flush.
It ends where the first stage has nothing in flight. Until a stage begins its first backward of an episode the pipeline
fills (warm-up); from the end of its last forward until all stages have ended their last backward it drains. Waiting for
a neighbour means something else then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from lightning_asyncpp.core.recording.trace import Beside, Span, Wait
from lightning_asyncpp.core.schedule import Kind
from lightning_asyncpp.tools.trace.recorded_run import RankTrace

Interval = tuple[float, float]
WORK = ("forward", "backward")
CAUSES = (
    "warm-up", "drain", "activation", "gradient", "send", "agreement", "update", "data", "evaluate", "checkpoint",
    "framework",
)  # fmt: skip
"""What a stage does when it neither runs a forward nor a backward; ``framework`` is what nothing recorded explains."""
# Where spans lie in each other the first of these counts: a wait inside a forward is a wait.
_ORDER: tuple[Kind | Wait | Beside, ...] = (
    Wait.ACTIVATION, Wait.GRADIENT, Wait.AGREEMENT, Beside.SEND, Kind.UPDATE, Kind.FORWARD, Kind.BACKWARD,
    Beside.CHECKPOINT, Beside.EVALUATE, Wait.DATA,
)  # fmt: skip
_RANK = {kind: rank for rank, kind in enumerate(_ORDER)}
_NAMES: dict[Kind | Wait | Beside, str] = {kind: kind.value for kind in _ORDER} | {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.UPDATE: "update",
}
_FILLING, _DRAINING = len(_ORDER), len(_ORDER) + 1
_NEIGHBOURS = (Wait.ACTIVATION, Wait.GRADIENT)


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


class Piece(NamedTuple):
    """A stretch of time with one cause.

    Attributes:
        start, end: in seconds.
        kind: what was done, the innermost where spans lie in each other; None if nothing was recorded.
        filling, draining: whether the pipeline was.
    """

    start: float
    end: float
    kind: Kind | Wait | Beside | None
    filling: bool
    draining: bool


def seconds_by_cause(spans: Sequence[Span], phases: Phases, start: float, end: float) -> dict[str, float]:
    """How long a stage worked, and how long it did not for which cause.

    Args:
        spans: of the stage.
        phases: when the pipeline fills and drains.
        start, end: of the time that is explained, in seconds.

    Returns:
        Seconds of every name of ``WORK`` and ``CAUSES``; together they are ``end - start``.
    """
    seconds = dict.fromkeys((*WORK, *CAUSES), 0.0)
    explaining = [span for span in spans if span.kind in _RANK]
    first = min((span.start for span in explaining), default=end)
    last = max((span.end for span in explaining), default=end)
    for piece in pieces(spans, phases, start, end):
        seconds[_cause(piece, first, last)] += piece.end - piece.start
    return seconds


def _cause(piece: Piece, first: float, last: float) -> str:
    if piece.kind in _NEIGHBOURS or piece.kind is Wait.AGREEMENT:
        if piece.draining:
            return "drain"
        return "warm-up" if piece.filling and piece.kind in _NEIGHBOURS else _NAMES[piece.kind]
    if piece.kind is not None:
        return _NAMES[piece.kind]
    if piece.end <= first:
        return "warm-up"
    return "drain" if piece.start >= last else "framework"


def pieces(spans: Sequence[Span], phases: Phases, start: float, end: float) -> Iterator[Piece]:
    """Cut the time from ``start`` to ``end`` wherever what is done changes."""
    moments = [(start, 0, 0), (end, 0, 0)]
    marked = [(s.start, s.end, _RANK[s.kind]) for s in spans if s.kind in _RANK]
    marked += [(*interval, _FILLING) for interval in phases.warm_up]
    marked += [(*interval, _DRAINING) for interval in phases.drain]
    for begin, finish, rank in marked:
        begin, finish = max(begin, start), min(finish, end)
        if finish > begin:
            moments += [(begin, rank, 1), (finish, rank, -1)]
    moments.sort()
    open_spans = [0] * (len(_ORDER) + 2)
    for (time, rank, change), (until, _, _) in pairwise(moments):
        open_spans[rank] += change
        if until > time:
            kind = next((kind for kind, count in zip(_ORDER, open_spans) if count), None)
            yield Piece(time, until, kind, open_spans[_FILLING] > 0, open_spans[_DRAINING] > 0)


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
