"""A recorded run: read from the files of its ranks, which may hold anything, and put on one clock.

No code from the files is run, and the line that cannot be read is named.
"""

from __future__ import annotations

import json
import math
import statistics
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from lightning_asyncpp.core.recording.trace import Beside, Span, Wait
from lightning_asyncpp.core.recording.trace_file import BATCH, END, FORMAT, PATTERN, VERSION, Meta
from lightning_asyncpp.core.schedule import Kind, Staleness

PER_MICRO_BATCH = frozenset({Kind.FORWARD, Kind.BACKWARD, Wait.ACTIVATION, Wait.GRADIENT, Beside.SEND})
_NO_WORK = frozenset({Wait.DATA, Beside.EVALUATE, Beside.CHECKPOINT, Beside.DRAIN})  # a drain has work inside it
_KINDS: dict[str, Kind | Wait | Beside] = {kind.value: kind for kinds in (Kind, Wait, Beside) for kind in kinds}
_LARGEST = 10**17  # number in a file: three years in ns, or 100 petabytes


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

    def place_of(self, k: int) -> int:
        """How many micro-batches of its mini-batch come before micro-batch ``k``."""
        place = bisect_right(self._firsts, k) - 1
        first = self._firsts[max(place, 0)] if self._firsts else 0
        return k - first if place >= 0 else (k - first) % self.micro_batches


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
        starts: dict[int, float] = {}
        for begun in self.ranks[0].starts:
            if begun.time is not None:  # the first time, of one that began anew when its gradient was dropped
                starts.setdefault(begun.mini_batch, begun.time)
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


def read_run(path: Path) -> RecordedRun:
    """Read a recorded run.

    Args:
        path: the folder with the files of its ranks, or one above it; of several recordings the newest is read.

    Raises:
        TraceError: there is none, or a file is not as it should be; with the file and the line.
    """
    folder = find_recording(path)
    ranks = [read_rank(file) for file in sorted(folder.glob(PATTERN))]
    expected = set(range(ranks[0].meta.num_stages * ranks[0].meta.num_replicas))
    notes = []
    if missing := sorted(expected - {rank.meta.rank for rank in ranks}):
        notes.append(f"the files of ranks {missing} are missing: copy them here to see the whole run")
    if cut := [rank.meta.rank for rank in ranks if not rank.complete]:
        notes.append(
            f"the recordings of ranks {cut} were cut off: the run was killed, or still goes on; what follows the"
            " end of the shortest is left out"
        )
    if folder != path:
        notes.append(f"read from {folder}, the newest recording below {path}")
    if (error := max(rank.meta.clock_error for rank in ranks)) > 0:
        notes.append(f"clocks of different hosts agree to {error * 1e6:.0f} us")
    return together(ranks, notes, folder)


def find_recording(path: Path) -> Path:
    """The newest folder with a recording at or below ``path``.

    Raises:
        TraceError: there is none.
    """
    if not path.exists():
        raise TraceError(f"{path} does not exist; name the folder that the run said its trace goes to")
    if path.is_dir() and any(path.glob(PATTERN)):
        return path
    if path.is_file() and path.match(PATTERN):
        raise TraceError(f"{path} is the recording of one rank; name its folder, {path.parent}")
    found = {file.parent for file in path.glob(f"**/{PATTERN}")} if path.is_dir() else set()
    if not found:
        raise TraceError(
            f"{path} holds no recording ({PATTERN}); record one with: asyncpp fit --trace, or PipelineTrace"
        )
    return max(found, key=lambda folder: max(file.stat().st_mtime for file in folder.glob(PATTERN)))


def read_rank(path: Path) -> RankTrace:
    """Read the file of one rank; its times are on the clock of rank 0.

    Raises:
        TraceError: with the file and the line.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    cut_off = lines.pop()  # what follows the last end of a line: nothing, or what a killed run got to write of a line
    if not lines:
        raise TraceError(f"{path}:1: the file is empty")
    meta = _read(path, 1, lines[0], _meta)
    shift = meta.origin + meta.clock_offset
    spans: list[Span] = []
    starts: list[BatchStart] = []
    ended = False
    for number, line in enumerate(lines[1:], 2):
        row = _read(path, number, line, _row)
        if row[0] == BATCH:
            starts.append(BatchStart(row[1], row[2], None if row[3] is None else row[3] * 1e-9 + shift))
        elif row[0] == END:
            ended = True
        else:
            kind, index, start, end, version, num_bytes = row
            spans.append(Span(_KINDS[kind], index, start * 1e-9 + shift, end * 1e-9 + shift, version, num_bytes))
    return RankTrace(meta, starts, spans, ended and not cut_off)


def _read(path: Path, number: int, line: str, check: Callable[[Any], Any]) -> Any:
    try:
        return check(json.loads(line))
    except ValueError as error:
        what = "is no JSON" if isinstance(error, json.JSONDecodeError) else str(error)
        raise TraceError(f"{path}:{number}: {what}: {line[:100]!r}") from None


def _meta(content: Any) -> Meta:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError("this is no recording of a pipeline")
    if content.get("version") != VERSION:
        raise ValueError(f"version {content.get('version')!r} of the format; this package reads version {VERSION}")
    values: dict[str, Any] = {}
    for field in fields(Meta):
        types: dict[Any, tuple[type, ...]] = {
            "int": (int,),
            "int | None": (int, type(None)),
            "float": (int, float),
            "str": (str,),
            "Staleness | None": (str, type(None)),
            "Slack | None": (int, str, type(None)),
        }
        value = content.get(field.name, None if field.default is MISSING else field.default)
        if not isinstance(value, types[field.type]) or isinstance(value, bool) or value in (math.inf, -math.inf):
            raise ValueError(f"{field.name} must be {field.type}, not {value!r}")
        values[field.name] = value
    meta = Meta(**values)
    if not (0 <= meta.stage < meta.num_stages and 0 <= meta.replica < meta.num_replicas and meta.micro_batches > 0):
        raise ValueError("stage, replica or micro_batches are out of range")
    _check_staleness(meta)
    return meta


def _check_staleness(meta: Meta) -> None:
    known = get_args(Staleness)
    if meta.staleness is not None and meta.staleness not in known:
        raise ValueError(f"staleness={meta.staleness!r} is none of {', '.join(known)}")
    if meta.slack is not None and (meta.slack != "exact" if isinstance(meta.slack, str) else meta.slack < 0):
        raise ValueError(f"slack={meta.slack!r} must be 'exact' or a whole number, 0 or more")
    if meta.shares_with is not None and not 0 <= meta.shares_with < meta.num_stages:
        raise ValueError("shares_with is out of range")


def _row(row: Any) -> list[Any]:
    if not isinstance(row, list) or not row:
        raise ValueError("a list was expected")
    length = {BATCH: 4, END: 2}.get(row[0] if isinstance(row[0], str) else "", 6)
    if length == 6 and (not isinstance(row[0], str) or row[0] not in _KINDS):
        raise ValueError(f"unknown kind {row[0]!r}")
    if len(row) != length:
        raise ValueError(f"{length} values were expected, not {len(row)}")
    numbers = row[1:-1] if row[0] == BATCH and row[-1] is None else row[1:]
    if any(type(value) is not int or abs(value) > _LARGEST for value in numbers):
        raise ValueError("whole numbers were expected")
    if length == 6 and row[3] < row[2]:
        raise ValueError("it ends before it begins")
    return row
