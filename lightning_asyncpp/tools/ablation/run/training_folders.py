"""The trainings of an ablation on disk: their folders, results and tables, and those that others have published."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path

from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.tools.ablation.grid import CellKey, Open
from lightning_asyncpp.tools.ablation.recipe.cell_config import (
    cell_config,
    cell_name,
    digest_of,
    own_sources,
    with_places,
)
from lightning_asyncpp.tools.ablation.recipe.recipe import Recipe
from lightning_asyncpp.tools.ablation.recipe.rows import Plan, RowRecipe, make_plan
from lightning_asyncpp.tools.ablation.recipe.yaml_files import write_yaml
from lightning_asyncpp.tools.ablation.report.summary import Ablation
from lightning_asyncpp.tools.ablation.report.tables import page
from lightning_asyncpp.tools.ablation.results import (
    CURVES,
    OPEN,
    RESULT,
    RESULTS,
    TABLE,
    CellResult,
    ResultsError,
    read_curves,
    read_result,
    read_results,
    write_lines,
    write_tables,
    write_whole,
)
from lightning_asyncpp.tools.ablation.run.cell import CELL

LOG = "cell.log"
CELLS = "cells"
_FAILED = "failed"  # holds the exit code of a training that ended by itself without a result
_RECIPE = "recipe"  # holds the path of the recipe that the table is of


Published = Mapping[str, tuple[str, CellResult]]
"""By what a training's name says that it trains: its name, and how it ended."""


def read_published(folder: Path) -> Published:
    """Read every ``results.csv``, with the ``curves.csv`` beside it, in a folder and in its subfolders.

    Of a training that several tables hold, the first one counts, by the name of its folder.

    Raises:
        ConfigurationError: there is none, or one of them is not a table; with all that is wrong in it.
    """
    paths = sorted(folder.rglob(RESULTS))
    if not paths:
        raise ConfigurationError(f"--published={str(folder)!r}: there is no {RESULTS} in it; give a folder of tables")
    published: dict[str, tuple[str, CellResult]] = {}
    for path in paths:
        try:
            table = _read_table(path)
        except ResultsError as error:
            raise ConfigurationError(f"--published={str(folder)!r}: {error}") from None
        published = {digest_of(name): (name, result) for name, result in table.items()} | published
    return published


def _read_table(path: Path) -> dict[str, CellResult]:
    curves = read_curves(path.with_name(CURVES))
    validation, training = curves.get("val_loss", {}), curves.get("train_loss", {})
    return {
        run.cell: CellResult(
            status="diverged" if run.loss is None else "finished",
            loss=run.loss,
            steps=run.steps,
            seconds=run.seconds,
            curve=validation.get(run.cell, []),
            train_curve=training.get(run.cell, []),
        )
        for run in read_results(path)[0]
    }


class Table:
    """The trainings of a recipe on disk: their folders, results and tables.

    Args:
        recipe: what to train.
        rows: its rows, all of them.
        folder: of the table.
        published: trainings that count as run, though they have no folder here.
    """

    def __init__(
        self, recipe: Recipe, rows: Sequence[RowRecipe], folder: Path, published: Published | None = None
    ) -> None:
        self.recipe = recipe
        self.folder = folder
        self.published = published or {}
        self.rows = {row.key: row for row in rows}
        self.results: dict[CellKey, CellResult] = {}
        self.places: dict[CellKey, str] = {}
        """Names of the trainings that the results were read from."""
        self._names: dict[CellKey, str] = {}

    def plan(self, rows: Sequence[RowRecipe] | None = None) -> Plan:
        """Plan ``rows``, by default all of them, with every result that is on disk."""
        rows = list(self.rows.values()) if rows is None else rows
        while True:
            outcomes = {key: result.loss for key, result in self.results.items()}
            plan = make_plan(rows, self.recipe.seeds, self.recipe.lr_extensions, outcomes)
            if not [key for key in plan.pending if self.take(key) is not None]:
                return plan

    def name(self, key: CellKey) -> str:
        """Name of a training's folder."""
        if key not in self._names:
            self._names[key] = cell_name(self.recipe, self.rows[key.row], key.lr, key.seed)
        return self._names[key]

    def digest(self, key: CellKey) -> str:
        """The same for the same training, in whatever row."""
        return digest_of(self.name(key))

    def cell_folder(self, key: CellKey) -> Path:
        """Folder of a training."""
        return self.folder.parent / CELLS / self.name(key)

    def take(self, key: CellKey) -> CellResult | None:
        """Read a result that is on disk, or take it from the published ones, and keep it.

        Tables of one output, and rows of one table, share what they have in common, whatever they call it.

        Raises:
            OSError: the result cannot be read.
        """
        for folder in self._folders(key):
            if (result := read_result(folder)) is not None:
                self.results[key], self.places[key] = result, folder.name
                return result
        if (known := self.published.get(self.digest(key))) is not None:
            self.places[key], self.results[key] = known
            return self.results[key]
        return None

    def was_tried(self, key: CellKey) -> bool:
        """Whether a training that has no result was started before."""
        return (self.cell_folder(key) / LOG).exists()

    def make_cell(self, key: CellKey, accelerator: str) -> Path:
        """Make the folder of a training anew; what an interrupted one left there is discarded."""
        folder = self.cell_folder(key)
        self.set_aside(key)
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        config = cell_config(self.recipe, self.rows[key.row], key.lr, key.seed)
        content = {"sources": own_sources(config)}
        content["config"] = with_places(config, self.recipe, folder.resolve(), accelerator)
        write_yaml(folder / CELL, content)
        return folder

    def set_aside(self, key: CellKey) -> Path | None:
        """Rename the folder of a training if it holds something as its result, which nothing here has written."""
        folder = self.cell_folder(key)
        if not (folder / RESULT).exists():
            return None
        names = (folder.with_name(f"{folder.name}.bak-{number}") for number in count(1))
        return folder.rename(next(name for name in names if not name.exists()))

    def note_failure(self, key: CellKey, code: int) -> None:
        """Keep that a training failed: one that was interrupted has a log without a result, too."""
        with contextlib.suppress(OSError):
            (self.cell_folder(key) / _FAILED).write_text(str(code))

    def write(self) -> None:
        """Write the tables from all results that the recipe asks for; the plots stay as they are."""
        plan = self.plan()
        results = {key: self.results[key] for key in plan.cells if key in self.results}
        self.folder.mkdir(parents=True, exist_ok=True)
        write_tables(self.folder, self.recipe.name, results, self.places)
        write_lines(self.folder / OPEN, Open, self._open(plan))
        plots = sorted(path.name for path in self.folder.glob("*.svg"))
        write_whole(self.folder / TABLE, page(Ablation.of(*read_results(self.folder / RESULTS)), plots))

    def check_recipe(self) -> None:
        """Refuse a table that is another recipe's, which would be lost.

        Raises:
            ConfigurationError: it is.
        """
        try:
            other = Path((self.folder / _RECIPE).read_text(encoding="utf-8").strip())
            same = other.read_bytes() == self.recipe.path.read_bytes()
        except FileNotFoundError:  # a new table, or one whose recipe was moved
            return
        if not same:
            raise ConfigurationError(
                f"name: {self.folder} is the table of another recipe, {other}; give this one another name or another"
                " output"
            )

    def keep_recipe(self) -> None:
        """Keep the table for this recipe."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / _RECIPE, f"{self.recipe.path.resolve()}\n")

    def _folders(self, key: CellKey) -> Iterator[Path]:
        """Where a training may be: its own folder, then those that call it otherwise."""
        own = self.cell_folder(key)
        yield own
        yield from sorted(folder for folder in own.parent.glob(f"*_{self.digest(key)}") if folder != own)

    def _open(self, plan: Plan) -> Iterator[Open]:
        for key in plan.pending:
            failed = (folder / LOG for folder in self._folders(key) if (folder / _FAILED).exists())
            log = next((os.path.relpath(path, self.folder) for path in failed), "")
            status = "failed" if log else "pending"
            yield Open(**key.row.columns(), lr=key.lr, seed=key.seed, status=status, log=log)
        for row in self.rows.values():
            if row.correction.same_lr and row.key not in plan.chosen:
                yield Open(**row.key.columns(), lr=None, seed=None, status="pending", log="")
