"""What a training of an ablation leaves behind, and the tables made of it."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_asyncpp.tools.ablation.rows import CellKey

RESULT = "result.json"
RESULT_COLUMNS = (
    "table", "optimizer", "correction", "delay", "stages", "momentum", "lr", "seed", "status", "loss", "steps",
    "seconds", "cell",
)  # fmt: skip
CURVE_COLUMNS = ("cell", "step", "metric", "value")
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
    samples: int | None = None
    """Samples trained on, if known."""
    reason: str = ""
    """Why it counts as diverged."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of the packages that decide the result."""


def write_result(folder: Path, result: CellResult) -> None:
    """Write ``result.json``, whole or not at all."""
    write_whole(folder / RESULT, json.dumps(asdict(result), indent=1, allow_nan=False))


def read_result(folder: Path) -> CellResult | None:
    """Read ``result.json``; ``None`` if the training has not ended, or the file is not what was written."""
    try:
        content = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        result = CellResult(**content)
        result.curve = [(int(step), float(value)) for step, value in result.curve]
        result.train_curve = [(int(step), float(value)) for step, value in result.train_curve]
    except (OSError, ValueError, TypeError):
        return None
    return result if _is_whole(result) else None


def write_tables(folder: Path, table: str, results: Mapping[CellKey, CellResult], cells: Mapping[CellKey, str]) -> None:
    """Write ``results.csv`` and ``curves.csv``: sorted, the same for the same results, whole or not at all.

    Args:
        folder: of the table.
        table: its name.
        results: of the trainings that are over.
        cells: the folder name of each.
    """
    rows, points = [], []
    for key in sorted(results, key=_order):
        row, result = key.row, results[key]
        loss = "" if result.loss is None else repr(result.loss)
        rows.append([
            table, row.optimizer, row.correction, row.delay, row.stages, row.momentum, f"{key.lr:.12g}", key.seed,
            result.status, loss, result.steps, f"{result.seconds:.2f}", cells[key],
        ])  # fmt: skip
        for metric, curve in (("val_loss", result.curve), ("train_loss", result.train_curve)):
            points += [[cells[key], step, metric, repr(value)] for step, value in curve]
    write_whole(folder / "results.csv", _csv(RESULT_COLUMNS, rows))
    write_whole(folder / "curves.csv", _csv(CURVE_COLUMNS, points))


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one step, so that nobody ever reads half of it."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    with open(temporary, "w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


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
    return row.optimizer, momentum, row.delay, row.stages, row.correction, key.lr, key.seed


def _csv(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()
