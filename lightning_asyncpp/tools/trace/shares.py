"""Where the time of a stage went: every moment has one cause, so that the shares add up to the whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from lightning_asyncpp.pipeline.schedule import Kind
from lightning_asyncpp.pipeline.trace import Beside, Span, Wait
from lightning_asyncpp.tools.trace.phases import Phases

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
