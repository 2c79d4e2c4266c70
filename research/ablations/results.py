"""The CSV files of an ablation: ``results.csv`` with a line per run, ``curves.csv`` with their losses by step."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from research.ablations.rows import Key, Row, Run, natural

RESULTS, CURVES = "results.csv", "curves.csv"
_COLUMNS = [
    "table", "optimizer", "correction", "delay", "stages", "momentum", "lr", "seed", "status", "loss", "steps",
    "seconds", "cell", "variant",
]  # fmt: skip
_TEXTS = dict.fromkeys(["table", "optimizer", "correction", "delay", "status", "cell", "variant"], str)


def read_runs(folder: Path) -> tuple[str, list[Run]]:
    """Read the name of a table and its runs."""
    frame = pd.read_csv(
        folder / RESULTS,
        dtype={**_TEXTS, "stages": "Int64"},
        keep_default_na=False,
        na_values=[""],
        converters=dict.fromkeys(["momentum", "lr", "loss", "seconds"], _exact),
    )
    frame = frame.reindex(columns=_COLUMNS)
    lines = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return (str(lines[0]["table"]) if lines else folder.name), [_run(line) for line in lines]


def _exact(text: str) -> float:
    return float(text or "nan")


def _run(line: dict) -> Run:
    row = Row(*(line[name] for name in Row._fields))
    loss = float("nan") if line["loss"] is None else float(line["loss"])
    return Run(Key(row, line["lr"], line["seed"]), loss, line["steps"], line["seconds"], line["cell"])


def read_curves(folder: Path) -> pd.DataFrame:
    """Read the curves: columns cell, step, metric (``val_loss`` or ``train_loss``) and value; empty without a file."""
    path = folder / CURVES
    if not path.exists():
        return pd.DataFrame(columns=["cell", "step", "metric", "value"])
    return pd.read_csv(path, converters={"value": _exact})


def write_table(folder: Path, table: str, runs: Iterable[Run], curves: pd.DataFrame) -> None:
    """Write both files, each whole or not at all: the same runs give the same bytes, whatever their order.

    Args:
        folder: where to.
        table: name of the ablation.
        runs: its runs; their ``cell`` may repeat, where one training stands in two rows.
        curves: of these runs, and maybe of others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    runs = sorted(runs, key=_order)
    frame = pd.DataFrame([_line(table, run) for run in runs], columns=_COLUMNS).astype({"stages": "Int64"})
    _write(frame, folder / RESULTS)
    cells = list(dict.fromkeys(run.cell for run in runs))
    places = {cell: place for place, cell in enumerate(cells)}
    curves = curves[curves.cell.isin(cells)].drop_duplicates(["cell", "step", "metric"])
    order = pd.DataFrame({"cell": curves.cell.map(places), "metric": curves.metric != "val_loss", "step": curves.step})
    _write(curves.loc[order.sort_values(["cell", "metric", "step"]).index], folder / CURVES)


def _line(table: str, run: Run) -> dict:
    row, lr, seed = run.key
    return row._asdict() | {
        "table": table, "lr": f"{lr:.12g}", "seed": seed, "steps": run.steps, "cell": run.cell,
        "momentum": None if row.momentum is None else f"{row.momentum:.12g}",
        "status": "finished" if run.loss == run.loss else "diverged", "loss": run.loss,
        "seconds": f"{run.seconds:.2f}",
    }  # fmt: skip


def _write(frame: pd.DataFrame, path: Path) -> None:
    new = path.with_suffix(".new")
    frame.to_csv(new, index=False, lineterminator="\n")
    new.replace(path)


def _order(run: Run) -> tuple:
    row, lr, seed = run.key
    delay = (0, int(row.kind), row.delay) if row.kind.isdecimal() else (1, 0, row.delay)
    momentum = -1.0 if row.momentum is None else row.momentum
    stages = "" if row.stages is None else str(row.stages)
    return row.optimizer, momentum, natural(row.variant or ""), delay, stages, row.correction, lr, seed
