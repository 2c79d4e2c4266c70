"""A recorded run: the spans of all ranks on one clock."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from lightning_asyncpp.pipeline.recording.file import Meta
from lightning_asyncpp.pipeline.schedule import Kind
from lightning_asyncpp.pipeline.trace import Beside, Span, Wait

PER_MICRO_BATCH = frozenset({Kind.FORWARD, Kind.BACKWARD, Wait.ACTIVATION, Wait.GRADIENT, Beside.SEND})
_NO_WORK = frozenset({Wait.DATA, Beside.EVALUATE, Beside.CHECKPOINT, Beside.DRAIN})  # a drain has work inside it


class TraceError(ValueError):
    """What was recorded cannot be read, or there is nothing of what was asked for."""


@dataclass(frozen=True)
class BatchStart:
    """When a rank began a mini-batch, and with which micro-batch; the time is None if that was before the recording."""

    mini_batch: int
    first: int
    time: float | None


@dataclass(frozen=True)
class RankTrace:
    """What one rank did.

    Attributes:
        meta: where it stands.
        starts: of its mini-batches, in order.
        spans: by their start; seconds of the common clock, from the start of the recording on.
        complete: whether the recording ended as it should.
    """

    meta: Meta
    starts: Sequence[BatchStart]
    spans: Sequence[Span]
    complete: bool = True

    @property
    def name(self) -> str:
        """What tables and pictures call it."""
        replica = f"r{self.meta.replica} " if self.meta.num_replicas > 1 else ""
        return f"{replica}stage {self.meta.stage}"

    @cached_property
    def micro_batches(self) -> int:
        """Micro-batches per mini-batch, accumulated ones included."""
        steps = [b.first - a.first for a, b in zip(self.starts, self.starts[1:])]
        return max(1, round(statistics.median(steps))) if steps else self.meta.micro_batches

    @cached_property
    def _firsts(self) -> list[int]:
        return [start.first for start in self.starts]

    def mini_batch(self, span: Span) -> int:
        """The mini-batch that a span belongs to."""
        if span.kind not in PER_MICRO_BATCH:
            return span.index
        return self.mini_batch_of(span.index)

    def mini_batch_of(self, k: int) -> int:
        """The mini-batch of micro-batch ``k``."""
        if not self.starts:
            return k // self.micro_batches
        place = bisect_right(self._firsts, k) - 1
        if place >= 0:
            return self.starts[place].mini_batch
        before = self.starts[0]
        return before.mini_batch - -(-(before.first - k) // self.micro_batches)


@dataclass(frozen=True)
class RecordedRun:
    """What all ranks did.

    Attributes:
        ranks: by replica and stage.
        start, end: of the time that is looked at, in seconds; the recording began at 0.
        notes: what a reader should know, such as missing ranks.
    """

    ranks: Sequence[RankTrace]
    start: float
    end: float
    notes: Sequence[str] = ()

    @property
    def meta(self) -> Meta:
        """Of any rank: what all have in common."""
        return self.ranks[0].meta

    @property
    def seconds(self) -> float:
        """How long the time that is looked at is."""
        return self.end - self.start

    @property
    def mini_batches(self) -> range:
        """The mini-batches that begin in it, on its first stage."""
        begun = [s.mini_batch for s in self.ranks[0].starts if s.time is not None and self.start <= s.time < self.end]
        return range(min(begun), max(begun) + 1) if begun else range(0)

    @property
    def is_whole(self) -> bool:
        """Whether the recordings of all ranks are there."""
        return len(self.ranks) == self.meta.num_stages * self.meta.num_replicas

    def replicas(self) -> list[list[RankTrace]]:
        """The stages of each replica."""
        numbers = sorted({rank.meta.replica for rank in self.ranks})
        return [[rank for rank in self.ranks if rank.meta.replica == number] for number in numbers]

    def between(self, first: int | None, last: int | None) -> RecordedRun:
        """The time from the start of mini-batch ``first`` to that of the one after ``last``, on the first stage.

        Raises:
            TraceError: the recording does not hold them.
        """
        if first is None and last is None:
            return self
        starts = {start.mini_batch: start.time for start in self.ranks[0].starts if start.time is not None}
        held = f"the recording holds mini-batches {min(starts)} to {max(starts)}" if starts else "it holds none"
        for name, value in (("--from-mini-batch", first), ("--to-mini-batch", last)):
            if value is not None and value not in starts:
                raise TraceError(f"{name} {value}: {held}")
        if first is not None and last is not None and first > last:
            raise TraceError(f"--from-mini-batch {first} lies behind --to-mini-batch {last}: swap them")
        start = self.start if first is None else max(self.start, starts[first])
        end = self.end if last is None else starts.get(last + 1, self.end)
        ranks = [replace(rank, spans=[s for s in rank.spans if s.end > start and s.start < end]) for rank in self.ranks]
        return RecordedRun(ranks, start, end, self.notes)


def together(ranks: Sequence[RankTrace], notes: Sequence[str], folder: Path) -> RecordedRun:
    """Put ranks on one clock that is 0 when the first of them begins its first batch.

    Where recordings were cut off, what follows the end of the shortest is left out: of that time not all is known.

    Raises:
        TraceError: they are of different recordings, or recorded nothing.
    """
    shapes = {(rank.meta.num_stages, rank.meta.num_replicas, rank.meta.micro_batches) for rank in ranks}
    if len(shapes) > 1:
        raise TraceError(
            f"{folder}: its files are of different runs (stages, replicas, micro-batches: {sorted(shapes)})"
        )
    begun = [start.time for rank in ranks for start in rank.starts if start.time is not None]
    worked = [span.end for rank in ranks for span in rank.spans if span.kind not in _NO_WORK]
    if not begun or not worked:
        raise TraceError(
            f"{folder}: nothing was recorded; did the run end before its first mini-batch of the recording?"
        )
    cut = [max((span.end for span in rank.spans), default=0.0) for rank in ranks if not rank.complete]
    zero, end = min(begun), min([max(worked), *cut])
    if end <= zero:
        raise TraceError(f"{folder}: a recording was cut off before the others began; remove its file to see them")
    placed = [_placed(rank, zero, end) for rank in ranks]
    return RecordedRun(sorted(placed, key=lambda r: (r.meta.replica, r.meta.stage)), 0.0, end - zero, notes)


def _placed(rank: RankTrace, zero: float, end: float) -> RankTrace:
    """A rank in the run's time; what began after its last work is no part of the run."""
    last = max((span.end for span in rank.spans if span.kind not in _NO_WORK), default=end)
    spans = [
        replace(span, start=span.start - zero, end=min(span.end, end) - zero)
        for span in rank.spans
        if span.start <= (last if span.kind in _NO_WORK else end)
    ]
    starts = [replace(s, time=None if s.time is None else s.time - zero) for s in rank.starts]
    return replace(rank, starts=starts, spans=sorted(spans, key=lambda span: (span.start, -span.end)))
