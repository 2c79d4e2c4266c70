"""Reads the files of a recorded run; it runs no code from them, and names the line that it cannot read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from lightning_asyncpp.pipeline.recording.file import BATCH, END, FORMAT, PATTERN, VERSION, Meta
from lightning_asyncpp.pipeline.schedule import Kind
from lightning_asyncpp.pipeline.trace import Beside, Span, Wait
from lightning_asyncpp.tools.trace.run import BatchStart, RankTrace, RecordedRun, TraceError, together

_KINDS: dict[str, Kind | Wait | Beside] = {kind.value: kind for kinds in (Kind, Wait, Beside) for kind in kinds}
_LARGEST = 10**17  # number in a file: three years in ns, or 100 petabytes


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
        types: dict[Any, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,)}
        value = content.get(field.name, None if field.default is MISSING else field.default)
        if not isinstance(value, types[field.type]) or isinstance(value, bool) or value in (math.inf, -math.inf):
            raise ValueError(f"{field.name} must be {field.type}, not {value!r}")
        values[field.name] = value
    meta = Meta(**values)
    if not (0 <= meta.stage < meta.num_stages and 0 <= meta.replica < meta.num_replicas and meta.micro_batches > 0):
        raise ValueError("stage, replica or micro_batches are out of range")
    return meta


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
