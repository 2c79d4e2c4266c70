"""Recorded runs, read from the files that the ranks wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from lightning_asyncpp.core.schedule import Kind
from lightning_asyncpp.core.trace import Activity, Span, SpanKind, Wait
from lightning_asyncpp.strategy_parts.recording import PATTERN, PER_MICROBATCH, Meta

_KINDS: dict[str, SpanKind] = {kind.value: kind for kinds in (Kind, Wait, Activity) for kind in kinds}


class TraceError(ValueError):
    """Error: a recording does not exist or cannot be read."""


@dataclass(frozen=True)
class RankTrace:
    """Spans (timed activities) of one rank.

    Attributes:
        meta: description of the rank.
        spans: spans in the order of their start, in seconds since the start of the recording.
        places: microbatch -> (its mini-batch, its position in the mini-batch).
    """

    meta: Meta
    spans: Sequence[Span]
    places: dict[int, tuple[int, int]]

    @cached_property
    def microbatches(self) -> int:
        """Number of microbatches per mini-batch, including those of accumulated batches."""
        return 1 + max((place for _, place in self.places.values()), default=0)

    def mini_batch(self, span: Span) -> int:
        """Return the mini-batch that a span belongs to."""
        return self.places[span.index][0] if span.kind in PER_MICROBATCH else span.index

    def of(self, *kinds: SpanKind) -> list[Span]:
        """Return the spans of some kinds."""
        return [span for span in self.spans if span.kind in kinds]


@dataclass(frozen=True)
class RecordedRun:
    """Spans of all ranks.

    Attributes:
        ranks: traces of the ranks, ordered by replica, then by stage.
        seconds: time from the start of the first forward, backward or update to the end of the last one.
        notes: notes for the reader, such as missing ranks.
    """

    ranks: Sequence[RankTrace]
    seconds: float
    notes: Sequence[str] = ()

    @property
    def meta(self) -> Meta:
        """Description of the first rank, for the values that all ranks share."""
        return self.ranks[0].meta

    @property
    def mini_batches(self) -> range:
        """Range of the mini-batches that begin in the recording."""
        begun = [self.ranks[0].mini_batch(span) for span in self.ranks[0].of(Kind.FORWARD)]
        return range(min(begun), max(begun) + 1) if begun else range(0)

    def replicas(self) -> list[list[RankTrace]]:
        """Return, for each replica, the traces of its stages."""
        numbers = sorted({rank.meta.replica for rank in self.ranks})
        return [[rank for rank in self.ranks if rank.meta.replica == number] for number in numbers]


def read_run(path: Path) -> RecordedRun:
    """Read a recorded run.

    Args:
        path: folder with the files of the ranks, or a folder above it, whose newest recording is read.

    Raises:
        TraceError: there is no recording, or a file cannot be read.
    """
    folder = find_recording(path)
    ranks = [read_rank(file) for file in sorted(folder.glob(PATTERN))]
    work = [span for rank in ranks for span in rank.of(*Kind)]
    if not work:
        raise TraceError(f"{folder}: nothing was recorded; did the run end before the first mini-batch to record?")
    zero = min(span.start for span in work)
    placed = [
        replace(rank, spans=[replace(s, start=s.start - zero, end=s.end - zero) for s in rank.spans]) for rank in ranks
    ]
    placed.sort(key=lambda rank: rank.meta.process)
    return RecordedRun(placed, max(span.end for span in work) - zero, _notes(ranks, folder, path))


def _notes(ranks: Sequence[RankTrace], folder: Path, asked: Path) -> list[str]:
    meta, notes = ranks[0].meta, []
    if missing := sorted({*range(meta.schedule.num_stages * meta.num_replicas)} - {rank.meta.rank for rank in ranks}):
        notes.append(f"the files of ranks {missing} are missing: copy them here to see the whole run")
    if folder != asked:
        notes.append(f"read from {folder}, the newest recording below {asked}")
    return notes


def find_recording(path: Path) -> Path:
    """Return the newest folder with a recording at or below ``path``.

    Raises:
        TraceError: there is no recording.
    """
    found = {file.parent for file in path.glob(f"**/{PATTERN}")} if path.is_dir() else set()
    if path in found:
        return path
    if not found:
        raise TraceError(
            f"{path} has no recording (files {PATTERN}); make one with `asyncpp fit --trace` or PipelineTrace"
        )
    return max(found, key=lambda folder: max(file.stat().st_mtime for file in folder.glob(PATTERN)))


def read_rank(path: Path) -> RankTrace:
    """Read the file of one rank.

    Raises:
        TraceError: a line cannot be read or is missing; the message names file and line.
    """
    meta: Meta | None = None
    spans: list[Span] = []
    places: dict[int, tuple[int, int]] = {}
    *lines, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")  # the last line may be incomplete
    for number, line in enumerate(lines[1:], 2):
        try:
            event = json.loads(line.rstrip(","))
            if event["name"] == "asyncpp":
                meta = Meta.from_json(event["args"])
            elif event["ph"] == "X":
                span, (mini_batch, place) = _span(event)
                spans.append(span)
                if span.kind in PER_MICROBATCH:
                    places[span.index] = mini_batch, place
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(f"{path}:{number} is not a line of a recording ({error!r}): {line[:100]!r}") from None
    if meta is None:
        raise TraceError(f"{path} is incomplete: its first lines, which describe the rank, are missing")
    return RankTrace(meta, sorted(spans, key=lambda span: (span.start, -span.end)), places)


def _span(event: dict) -> tuple[Span, tuple[int, int]]:
    start, about = event["ts"] * 1e-6, event["args"]
    kind = _KINDS[event["cat"]]
    span = Span(kind, about["index"], start, start + event["dur"] * 1e-6, about["version"], about["bytes"])
    return span, (about["mini_batch"], about["place"])
