"""An ablation whose trainings only pretend to train."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_asyncpp.tools.ablation.recipe.rows import Plan, make_rows
from lightning_asyncpp.tools.ablation.results import CellResult
from lightning_asyncpp.tools.ablation.run.conditions import slots
from lightning_asyncpp.tools.ablation.run.training_folders import Table
from lightning_asyncpp.tools.ablation.run.training_runner import Runner, Running
from tests.tools.ablation.small import ADAMW, load_recipe, write_ablation

# Reads its learning rate from the folder's name and writes a result; some learning rates are special.
PRETENDER = """
import json, os, re, sys, time
folder = sys.argv[1]
open(folder + "/runs", "a").write("x")
lr = float(re.search("_lr([^_]+)_", folder)[1])
assert os.environ["OMP_NUM_THREADS"] == "3"
time.sleep(0.1)
if lr == 0.5: sys.exit("this one fails")
if lr == 0.75: sys.exit(75)
open(folder + "/progress", "w").write("1/2")
while lr == 0.25: time.sleep(1)
result = dict(status="finished", loss=lr, steps=2, seconds=1.0, curve=[[1, 9.0], [2, lr]])
if lr == 9.0: result.update(status="diverged", loss=None)
json.dump(result, open(folder + "/result.tmp", "w"))
os.replace(folder + "/result.tmp", folder + "/result.json")
"""


class Told:
    """Keeps what the runner tells."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.warnings: list[str] = []
        self.most = 0
        self.alone = True

    def ended(self, running: Running, result: CellResult | None) -> None:
        self.names.append(f"{running.key.lr:g}/{running.key.seed}:{result.status if result else 'failed'}")

    def show(self, plan: Plan, running: Sequence[Running]) -> None:
        self.most = max(self.most, len(running))
        self.alone = self.alone and (bool(self.names) or len(running) < 2 or any(r.progress() for r in running))

    def warn(self, message: str) -> None:
        self.warnings.append(message)


def table_of(folder: Path, lrs: list[float], **changes: Any) -> Table:
    path = write_ablation(folder, text=False, **({"optimizers": {"AdamW": ADAMW | {"lr": lrs}}} | changes))
    recipe = load_recipe(path)
    return Table(recipe, make_rows(recipe), folder / "out" / "tiny")


def run(table: Table, workers: int = 2) -> tuple[Runner, Told]:
    told = Told()
    runner = Runner(table, list(table.rows.values()), slots(workers, 3, []), "cpu", told)
    runner.run()
    return runner, told


def results_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))
