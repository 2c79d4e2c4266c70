"""What a training of an ablation leaves behind, and the CSV files made of it: how they are written, read and checked.

The columns of a file are the fields of a dataclass of `grid.py`, and their metadata say how numbers are written.
"""

from __future__ import annotations

import csv
import errno
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lightning_asyncpp.storage.durable import write_durably
from lightning_asyncpp.tools.ablation.grid import UNCORRECTED, CellKey, CurvePoint, Open, Run, natural

RESULT = "result.json"
RESULTS, CURVES, OPEN, TABLE = "results.csv", "curves.csv", "open.csv", "table.md"
Curve = list[tuple[int, float]]
Curves = dict[str, Curve]
Line = TypeVar("Line", Run, Open, CurvePoint)
_SHOWN_PROBLEMS = 20


class ResultsError(ValueError):
    """Files of an ablation that cannot be read; the message names each file and line."""


@dataclass
class CellResult:
    """How a training ended."""

    status: str
    """``finished`` or ``diverged``."""
    loss: float | None
    """Last validation loss; ``None`` if it diverged."""
    steps: int
    """Updates done."""
    seconds: float
    """Length of the training with its validations, without the start."""
    metric: str = "val_loss"
    """What the module calls its validation loss; ``val_loss`` in the tables."""
    curve: Curve = field(default_factory=list)
    """(step, value of the metric) of every validation."""
    train_curve: Curve = field(default_factory=list)
    """(step, training loss), means of neighbouring steps."""
    reason: str = ""
    """Why it counts as diverged."""
    versions: dict[str, str] = field(default_factory=dict)
    """What besides the recipe may change the result: versions of packages, device, threads; what is known of it."""


def write_result(folder: Path, result: CellResult) -> None:
    """Write ``result.json``, whole or not at all."""
    write_whole(folder / RESULT, json.dumps(asdict(result), indent=1, allow_nan=False))


def read_result(folder: Path) -> CellResult | None:
    """Read ``result.json``, but for what other versions of this package have added to it.

    Returns:
        ``None`` if the training has not ended, or the file is not what was written.

    Raises:
        OSError: there is a file, and it cannot be read.
    """
    known = {entry.name for entry in fields(CellResult)}
    try:
        content = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        result = CellResult(**{name: value for name, value in content.items() if name in known})
        result.curve = [(int(step), float(value)) for step, value in result.curve]
        result.train_curve = [(int(step), float(value)) for step, value in result.train_curve]
        result.versions = {str(name): str(value) for name, value in result.versions.items()}
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, AttributeError):
        return None
    return result if _is_whole(result) else None


def thinned(curve: Sequence[tuple[int, float]], points: int = 200) -> Curve:
    """Means of neighbouring steps, each at its last step; at most ``points`` of them."""
    length = max(1, math.ceil(len(curve) / points))
    parts = [curve[i : i + length] for i in range(0, len(curve), length)]
    return [(part[-1][0], math.fsum(value for _, value in part) / len(part)) for part in parts]


def _is_whole(result: CellResult) -> bool:
    if result.status == "diverged":
        return result.loss is None
    return result.status == "finished" and isinstance(result.loss, float) and math.isfinite(result.loss)


def write_tables(folder: Path, table: str, results: Mapping[CellKey, CellResult], cells: Mapping[CellKey, str]) -> None:
    """Write ``results.csv`` and ``curves.csv``: sorted, the same for the same results, whole or not at all.

    Args:
        folder: of the table.
        table: its name.
        results: of the trainings that are over.
        cells: the name of the folder that each was read from; the same training in two rows has one.
    """
    runs: list[Run] = []
    points: dict[str, list[CurvePoint]] = {}
    for key in sorted(results, key=_order):
        result, cell = results[key], cells[key]
        run = Run(
            table, **key.row.columns(), lr=key.lr, seed=key.seed, status=result.status, loss=result.loss,
            steps=result.steps, seconds=result.seconds, cell=cell,
        )  # fmt: skip
        runs.append(run)
        points[cell] = [
            CurvePoint(cell, step, metric, value)
            for metric, curve in (("val_loss", result.curve), ("train_loss", result.train_curve))
            for step, value in curve
        ]
    write_lines(folder / RESULTS, Run, runs)
    write_lines(folder / CURVES, CurvePoint, [point for curve in points.values() for point in curve])


def write_lines(path: Path, kind: type[Line], lines: Iterable[Line]) -> None:
    """Write a CSV file, whole or not at all: ``lines`` of the dataclass ``kind``, whose fields are the columns."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    columns = fields(kind)
    writer.writerow([column.name for column in columns])
    writer.writerows([_text(column, getattr(line, column.name)) for column in columns] for line in lines)
    write_whole(path, text.getvalue())


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one step, so that nobody ever reads half of it.

    Raises:
        OSError: it cannot be written, or there is a folder in its place.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    write_durably(path, text.encode())


def read_results(path: Path) -> tuple[list[Run], list[Open]]:
    """Read and check ``results.csv`` and, if it is there, ``open.csv`` beside it.

    Raises:
        ResultsError: all that is wrong, by file and line.
    """
    problems: list[str] = []
    lines = list(_parsed(path, Run, _check_run, problems))
    seen: dict[object, int] = {}
    for number, run in lines:
        first = seen.setdefault((run.row, run.lr, run.seed), number)
        if first != number:
            problems.append(f"{path}:{number}: repeats the row, learning rate and seed of line {first}; keep one")
    tables = sorted({run.table for _, run in lines})
    if len(tables) > 1:
        problems.append(f"{path}: holds several ablations ({', '.join(tables)}); a folder holds one")
    missing = path.with_name(OPEN)
    left = [one for _, one in _parsed(missing, Open, _check_open, problems)] if missing.exists() else []
    _raise(problems)
    return [run for _, run in lines], left


def read_curves(path: Path) -> dict[str, Curves]:
    """Read and check ``curves.csv``: by metric, its values against step by cell; nothing if the file is not there.

    Raises:
        ResultsError: all that is wrong, by file and line.
    """
    if not path.exists():
        return {}
    problems: list[str] = []
    found: dict[str, Curves] = {}
    for _, point in _parsed(path, CurvePoint, lambda texts: None, problems):
        found.setdefault(point.metric, {}).setdefault(point.cell, []).append((point.step, point.value))
    _raise(problems)
    return {metric: {cell: sorted(points) for cell, points in curves.items()} for metric, curves in found.items()}


def _parsed(
    path: Path, kind: type[Line], check: Callable[[dict[str, str]], None], problems: list[str]
) -> Iterator[tuple[int, Line]]:
    """The lines that can be parsed, with their numbers; what is wrong with the others goes to ``problems``."""
    columns = fields(kind)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, strict=True)
            names = [column.name for column in columns]
            if missing := [c.name for c in columns if c.default is MISSING and c.name not in (reader.fieldnames or ())]:
                problems.append(f"{path}:1: no column {', '.join(missing)}; expected {','.join(names)}")
                return
            for texts in reader:
                if None in texts or None in texts.values():
                    problems.append(f"{path}:{reader.line_num}: not as many fields as the header names")
                    continue
                try:
                    check(texts)
                    line = kind(**{c.name: _value(c, texts[c.name]) for c in columns if c.name in texts})
                except ValueError as error:
                    problems.append(f"{path}:{reader.line_num}: {error}")
                else:
                    yield reader.line_num, line
    except FileNotFoundError:
        problems.append(f"{path}: no such file; `asyncpp ablate RECIPE` writes it")
    except (csv.Error, UnicodeDecodeError) as error:
        problems.append(f"{path}: not a CSV file: {error}")


def _text(column: Field, value: Any) -> str:
    return "" if value is None else format(value, column.metadata.get("form", ""))


def _value(column: Field, text: str) -> Any:
    kind, _, or_none = str(column.type).partition(" | ")
    if or_none and not text:
        return None
    if kind == "str":
        return text
    parse, wanted = _NUMBERS[column.metadata.get("kind", kind)]
    try:
        return parse(text)
    except ValueError:
        raise ValueError(f'{column.name} is "{text}"; expected {wanted}') from None


def _finite(text: str, above: float = -math.inf) -> float:
    value = float(text)
    if not above < value < math.inf:
        raise ValueError
    return value


_NUMBERS: Mapping[str, tuple[Callable[[str], float], str]] = {
    "int": (int, "a whole number"),
    "float": (_finite, "a finite number"),
    "positive": (partial(_finite, above=0.0), "a positive number"),
    "any": (float, "a number"),
}
"""Type of a field, or what its metadata say -> how its text is read, and what is expected there."""


def _check_run(texts: dict[str, str]) -> None:
    """What a run's columns say of each other."""
    status, loss = texts["status"], texts["loss"]
    if status not in ("finished", "diverged"):
        raise ValueError(f'status is "{status}"; expected finished or diverged')
    if status == "diverged" and loss:
        raise ValueError(f'loss is "{loss}" although the run diverged; expected nothing')
    if status == "finished" and not loss:
        raise ValueError('loss is ""; expected a finite number')
    texts["correction"] = texts["correction"] or UNCORRECTED


def _check_open(texts: dict[str, str]) -> None:
    status, lr, seed = texts["status"], texts["lr"], texts["seed"]
    if status not in ("failed", "pending"):
        raise ValueError(f'status is "{status}"; expected failed or pending')
    if status == "failed" and not lr:
        raise ValueError('lr is ""; expected a positive number')
    if lr and not seed:
        raise ValueError('seed is ""; expected a whole number')
    texts["seed"] = seed if lr else ""
    texts["correction"] = texts["correction"] or UNCORRECTED


def _raise(problems: Sequence[str]) -> None:
    if problems:
        more = len(problems) - _SHOWN_PROBLEMS
        raise ResultsError("\n".join([*problems[:_SHOWN_PROBLEMS], *([f"... and {more} more"] if more > 0 else [])]))


def _order(key: CellKey) -> tuple[Any, ...]:
    row, momentum, variant = key.row, key.row.group.momentum, natural(key.row.group.variant or "")
    first = row.delay.partition(" ")[0]
    delay = (0, int(first), row.delay) if first.isdecimal() else (1, 0, row.delay)
    stages = "" if row.stages is None else str(row.stages)
    group = row.group.optimizer, -1.0 if momentum is None else momentum, variant
    return *group, delay, stages, row.correction, key.lr, key.seed
