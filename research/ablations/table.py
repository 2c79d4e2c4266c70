"""The trainings of a recipe on disk: what is known of them, and what is missing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from research.ablations.recipe import RESULT, Arm, Recipe
from research.ablations.results import read_curves, read_runs, write_table
from research.ablations.rows import Key, Row, Run
from research.ablations.search import Plan, make_plan


class Table:
    """The runs of a recipe.

    A run is known if its folder holds a result, or if one of the recipe's published tables has a run of the same names,
    learning rate and seed. All runs of the published table of the recipe's own name stay in it.

    Args:
        recipe: what to train.
        output: holds the table's folder, and ``cells`` with a folder per training, which tables share.
        fresh: leave the published tables aside.
    """

    def __init__(self, recipe: Recipe, output: Path, fresh: bool = False) -> None:
        self.recipe = recipe
        self.arms: dict[Row, Arm] = {arm.row: arm for arm in recipe.arms()}
        self.folder = output / recipe.name
        self.cells = output / "cells"
        self.runs: dict[Key, Run] = {}
        self._published: dict[Key, Run] = {}
        self._curves = []
        for place in () if fresh else recipe.published:
            name, runs = read_runs(recipe.folder / place)
            known = {run.key: run for run in runs}
            self._published = known | self._published
            self.runs |= known if name == recipe.name else {}
            self._curves.append(read_curves(recipe.folder / place))

    def plan(self, arms: Sequence[Arm]) -> tuple[Plan, list[Key]]:
        """Return the trainings that the arms need, and those of them that have not been run."""
        while True:
            losses = {key: run.loss for key, run in self.runs.items()}
            plan = make_plan(arms, self.recipe.seeds, self.recipe.lr_extensions, losses)
            missing = [key for key in plan.needed if key not in self.runs]
            if not [key for key in missing if self.take(key)]:
                return plan, missing

    def cell(self, key: Key) -> Path:
        """Return a training's folder; rows that train the same differ in its name, but not after the last ``_``."""
        return self.cells / self.recipe.cell_name(self.arms[key.row], key)

    def take(self, key: Key) -> Run | None:
        """Take up a result, of this row or of another that trains the same, or the published one."""
        digest = self.cell(key).name.rpartition("_")[2]
        for path in sorted(self.cells.glob(f"*_{digest}/{RESULT}")):
            content, name = json.loads(path.read_text(encoding="utf-8")), path.parent.name
            loss = float("nan") if content["loss"] is None else content["loss"]
            curve = pd.DataFrame(content["curve"], columns=["step", "metric", "value"])
            self._curves.append(curve.assign(cell=name)[["cell", "step", "metric", "value"]])
            self.runs[key] = Run(key, loss, content["steps"], content["seconds"], name)
            return self.runs[key]
        if key in self._published:
            self.runs[key] = self._published[key]
        return self.runs.get(key)

    def write(self) -> None:
        """Write ``results.csv`` and ``curves.csv``."""
        self.plan(list(self.arms.values()))
        if self.runs:
            write_table(self.folder, self.recipe.name, self.runs.values(), pd.concat(self._curves, ignore_index=True))
