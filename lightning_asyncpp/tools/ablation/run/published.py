"""Finished trainings out of the tables that others have published: ``asyncpp ablate RECIPE --published FOLDER``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lightning_asyncpp.pipeline.errors import ConfigurationError
from lightning_asyncpp.tools.ablation.recipe.config import digest_of
from lightning_asyncpp.tools.ablation.report.reading import ResultsError, read_all_curves, read_results
from lightning_asyncpp.tools.ablation.results import CURVES, RESULTS, CellResult

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
    curves = read_all_curves(path.with_name(CURVES))
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
        for run in read_results(path).runs
    }
