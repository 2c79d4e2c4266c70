"""Reads and checks the CSV files of an ablation."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from lightning_asyncpp.tools.ablation.grid import UNCORRECTED, Group, Open, Row, Run
from lightning_asyncpp.tools.ablation.report.summary import Ablation
from lightning_asyncpp.tools.ablation.results import (
    CURVE_COLUMNS,
    OPEN,
    OPEN_COLUMNS,
    RESULT_COLUMNS,
)

_SHOWN_PROBLEMS = 20

Curves = dict[str, list[tuple[int, float]]]
T = TypeVar("T")


class ResultsError(ValueError):
    """Files of an ablation that cannot be read; the message names each file and line."""


def read_results(path: Path) -> Ablation:
    """Read and check ``results.csv`` and, if it is there, ``open.csv`` beside it.

    Raises:
        ResultsError: all that is wrong, by file and line.
    """
    problems: list[str] = []
    lines = list(_parsed(path, RESULT_COLUMNS, _run, problems))
    seen: dict[object, int] = {}
    for number, run in lines:
        first = seen.setdefault((run.row, run.lr, run.seed), number)
        if first != number:
            problems.append(f"{path}:{number}: repeats the row, learning rate and seed of line {first}; keep one")
    tables = sorted({run.table for _, run in lines})
    if len(tables) > 1:
        problems.append(f"{path}: holds several ablations ({', '.join(tables)}); a folder holds one")
    missing = path.with_name(OPEN)
    left = [one for _, one in _parsed(missing, OPEN_COLUMNS, _open, problems)] if missing.exists() else []
    _raise(problems)
    return Ablation.of((run for _, run in lines), left)


def read_curves(path: Path) -> Curves:
    """Validation loss against step by cell, as :func:`read_all_curves` reads it."""
    return read_all_curves(path).get("val_loss", {})


def read_all_curves(path: Path) -> dict[str, Curves]:
    """Read and check ``curves.csv``: by metric, its values against step by cell; nothing if the file is not there.

    Raises:
        ResultsError: all that is wrong, by file and line.
    """
    if not path.exists():
        return {}
    problems: list[str] = []
    found: dict[str, Curves] = {}
    for _, (cell, metric, step, value) in _parsed(path, CURVE_COLUMNS, _point, problems):
        found.setdefault(metric, {}).setdefault(cell, []).append((step, value))
    _raise(problems)
    return {metric: {cell: sorted(points) for cell, points in curves.items()} for metric, curves in found.items()}


def _parsed(
    path: Path, columns: Sequence[str], parse: Callable[[Mapping[str, str]], T], problems: list[str]
) -> Iterator[tuple[int, T]]:
    """The lines that can be parsed, with their numbers; what is wrong with the others goes to ``problems``."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, strict=True)
            missing = [name for name in columns if name not in (reader.fieldnames or ())]
            if missing:
                problems.append(f"{path}:1: no column {', '.join(missing)}; expected {','.join(columns)}")
                return
            for fields in reader:
                if None in fields or None in fields.values():
                    problems.append(f"{path}:{reader.line_num}: not as many fields as the header names")
                    continue
                try:
                    yield reader.line_num, parse(fields)
                except ValueError as error:
                    problems.append(f"{path}:{reader.line_num}: {error}")
    except FileNotFoundError:
        problems.append(f"{path}: no such file; `asyncpp ablate RECIPE` writes it")
    except (csv.Error, UnicodeDecodeError) as error:
        problems.append(f"{path}: not a CSV file: {error}")


def _run(fields: Mapping[str, str]) -> Run:
    status, loss = fields["status"], fields["loss"]
    if status not in ("finished", "diverged"):
        raise ValueError(f'status is "{status}"; expected finished or diverged')
    if status == "diverged" and loss:
        raise ValueError(f'loss is "{loss}" although the run diverged; expected nothing')
    row = _row(fields)
    return Run(
        table=fields["table"],
        optimizer=row.group.optimizer,
        correction=row.correction,
        delay=row.delay,
        stages=row.stages,
        momentum=row.group.momentum,
        lr=_number(fields, "lr", _positive),
        seed=_number(fields, "seed", int),
        loss=_number(fields, "loss", float) if status == "finished" else None,
        steps=_number(fields, "steps", int),
        seconds=_number(fields, "seconds", float),
        cell=fields["cell"],
    )


def _open(fields: Mapping[str, str]) -> Open:
    status = fields["status"]
    if status not in ("failed", "pending"):
        raise ValueError(f'status is "{status}"; expected failed or pending')
    lr = _number(fields, "lr", _positive) if fields["lr"] or status == "failed" else None
    seed = None if lr is None else _number(fields, "seed", int)
    return Open(_row(fields), lr, seed, status == "failed", fields["log"])


def _row(fields: Mapping[str, str]) -> Row:
    momentum = _number(fields, "momentum", float) if fields["momentum"] else None
    stages = _number(fields, "stages", int) if fields["stages"] else None
    return Row(Group(fields["optimizer"], momentum), fields["delay"], stages, fields["correction"] or UNCORRECTED)


def _point(fields: Mapping[str, str]) -> tuple[str, str, int, float]:
    try:
        value = float(fields["value"])  # may be nan or inf: a diverging curve
    except ValueError:
        raise ValueError(f'value is "{fields["value"]}"; expected a number') from None
    return fields["cell"], fields["metric"], _number(fields, "step", int), value


def _number(fields: Mapping[str, str], name: str, kind: Callable[[str], T]) -> T:
    try:
        value = kind(fields[name])
        if not math.isfinite(value):  # type: ignore[arg-type]
            raise ValueError
    except ValueError:
        wanted = {int: "a whole number", float: "a finite number"}.get(kind, "a positive number")  # type: ignore[call-overload]
        raise ValueError(f'{name} is "{fields[name]}"; expected {wanted}') from None
    return value


def _positive(text: str) -> float:
    value = float(text)
    if value <= 0:
        raise ValueError
    return value


def _raise(problems: Sequence[str]) -> None:
    if problems:
        more = len(problems) - _SHOWN_PROBLEMS
        raise ResultsError("\n".join([*problems[:_SHOWN_PROBLEMS], *([f"... and {more} more"] if more > 0 else [])]))
