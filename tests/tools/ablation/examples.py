"""Hand-made runs of an ablation, as objects and as the CSV files that the runner writes."""

from __future__ import annotations

import math

from lightning_asyncpp.tools.ablation.grid import CurvePoint, Open, Run
from lightning_asyncpp.tools.ablation.results import write_lines


def run(
    loss,
    seed=1,
    lr=0.01,
    *,
    optimizer="Muon",
    correction="none",
    delay="1",
    stages=None,
    momentum=None,
    steps=600,
    variant=None,
):
    cell = f"{optimizer}-{momentum}-{variant}-{delay}-{stages}-{correction}-{lr:g}-{seed}"
    status = "finished" if loss is not None else "diverged"
    return Run(
        "demo", optimizer, correction, delay, stages, momentum, lr, seed, status, loss, steps, 40.0, cell, variant
    )


def seeds(losses, **row):
    """A run per loss, with seeds 1, 2, ..."""
    return [run(loss, seed, **row) for seed, loss in enumerate(losses, start=1)]


def search(losses, seed=1, **row):
    """A run per learning rate, from a dict of losses."""
    return [run(loss, seed, lr, **row) for lr, loss in losses.items()]


def left(lr=0.01, seed=1, log="", *, optimizer="Muon", correction="none", delay="1", stages=None, momentum=None):
    """A training without a result: failed if it has a log, else still to be run."""
    seed, status = None if lr is None else seed, "failed" if log else "pending"
    return Open(optimizer, correction, delay, stages, momentum, lr, seed, status, log)


def write_open(folder, ones):
    """As the runner writes it."""
    write_lines(folder / "open.csv", Open, ones)


def write_results(folder, runs):
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / "results.csv", Run, runs)
    return folder / "results.csv"


def write_curves(folder, runs):
    """Curves that fall exponentially to each run's loss, validated every 50 steps."""
    points = []
    for r in runs:
        for step in range(0, r.steps + 1, 50):
            value = math.nan if r.loss is None else r.loss + 4 * math.exp(-step / 80)
            points.append(CurvePoint(r.cell, step, "val_loss", value))
            points.append(CurvePoint(r.cell, step, "train_loss", value - 0.1))
    write_lines(folder / "curves.csv", CurvePoint, points)
    return folder / "curves.csv"


def whole_grid(optimizers=(("AdamW", 1.8, 0.3), ("Muon", 1.5, 0.05))):
    """Optimizers (name, loss, gap) with momentum swept, depth varied, one correction: data for every plot."""
    runs = []
    for optimizer, sync, gap in optimizers:
        for momentum in (0.5, 0.9):
            rows = [("0", None, "none", 0), ("1", None, "none", gap), ("1", None, "EF", 0.4 * gap)]
            rows += [("pipedream", stages, "none", 0.2 * stages * gap) for stages in (2, 4, 8)]
            for delay, stages, correction, more in rows:
                row = {"optimizer": optimizer, "momentum": momentum, "delay": delay, "stages": stages}
                row |= {"correction": correction}
                loss = sync + more * (1.5 - momentum)
                runs += search({0.003: loss + 0.1, 0.03: None if more else loss + 0.2}, **row)
                runs += seeds([loss, loss + 0.01, loss - 0.02], **row)
    return runs
