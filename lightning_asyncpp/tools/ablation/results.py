"""What a training of an ablation leaves behind, and the tables made of it."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from lightning_asyncpp.tools.ablation.recipe.rows import CellKey, RowKey

RESULT = "result.json"
RESULTS, CURVES, OPEN, TABLE = "results.csv", "curves.csv", "open.csv", "table.md"
RESULT_COLUMNS = (
    "table", "optimizer", "correction", "delay", "stages", "momentum", "lr", "seed", "status", "loss", "steps",
    "seconds", "cell",
)  # fmt: skip
CURVE_COLUMNS = ("cell", "step", "metric", "value")
OPEN_COLUMNS = ("optimizer", "correction", "delay", "stages", "momentum", "lr", "seed", "status", "log")
Curve = list[tuple[int, float]]


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


def write_tables(folder: Path, table: str, results: Mapping[CellKey, CellResult], cells: Mapping[CellKey, str]) -> None:
    """Write ``results.csv`` and ``curves.csv``: sorted, the same for the same results, whole or not at all.

    Args:
        folder: of the table.
        table: its name.
        results: of the trainings that are over.
        cells: the name of the folder that each was read from; the same training in two rows has one.
    """
    rows, points = [], {}
    for key in sorted(results, key=_order):
        row, result = key.row, results[key]
        loss = "" if result.loss is None else repr(result.loss)
        rows.append([
            table, row.optimizer, row.correction, row.delay, row.stages, row.momentum, f"{key.lr:.12g}", key.seed,
            result.status, loss, result.steps, f"{result.seconds:.2f}", cells[key],
        ])  # fmt: skip
        points[cells[key]] = [
            [cells[key], step, metric, repr(value)]
            for metric, curve in (("val_loss", result.curve), ("train_loss", result.train_curve))
            for step, value in curve
        ]
    write_whole(folder / RESULTS, _csv(RESULT_COLUMNS, rows))
    write_whole(folder / CURVES, _csv(CURVE_COLUMNS, [point for curve in points.values() for point in curve]))


def write_open(folder: Path, trainings: Iterable[tuple[RowKey, float | None, int | None, str]]) -> None:
    """Write ``open.csv``: what has no result yet.

    Args:
        folder: of the table.
        trainings: row, learning rate, seed and, if it failed, path of the log of each; without learning rate and
            seed: a row that waits for the learning rate of another one.
    """
    rows = [
        [*row, "" if lr is None else f"{lr:.12g}", "" if seed is None else seed, "failed" if log else "pending", log]
        for row, lr, seed, log in trainings
    ]
    write_whole(folder / OPEN, _csv(OPEN_COLUMNS, rows))


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one step, so that nobody ever reads half of it."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def thinned(curve: Sequence[tuple[int, float]], points: int = 200) -> Curve:
    """Means of neighbouring steps, each at its last step; at most ``points`` of them."""
    length = max(1, math.ceil(len(curve) / points))
    parts = [curve[i : i + length] for i in range(0, len(curve), length)]
    return [(part[-1][0], math.fsum(value for _, value in part) / len(part)) for part in parts]


def _is_whole(result: CellResult) -> bool:
    if result.status == "diverged":
        return result.loss is None
    return result.status == "finished" and isinstance(result.loss, float) and math.isfinite(result.loss)


def _order(key: CellKey) -> tuple[Any, ...]:
    row = key.row
    momentum = float(row.momentum) if row.momentum else -1.0
    first = row.delay.partition(" ")[0]
    delay = (0, int(first), row.delay) if first.isdecimal() else (1, 0, row.delay)
    return row.optimizer, momentum, delay, row.stages, row.correction, key.lr, key.seed


def _csv(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()
