"""``python -m lightning_asyncpp.tools.ablation.report FOLDER``: the tables and plots of an ablation, made again."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser

from lightning_asyncpp.optional_packages import missing_packages, needed
from lightning_asyncpp.tools.ablation.report.summary import Ablation
from lightning_asyncpp.tools.ablation.report.tables import page
from lightning_asyncpp.tools.ablation.results import (
    CURVES,
    RESULTS,
    TABLE,
    ResultsError,
    read_curves,
    read_results,
    write_whole,
)


def write_report(folder: Path) -> None:
    """Write ``table.md`` and the plots (``*.svg``) beside the CSV files of an ablation.

    A plot is written where its data exist, and one whose data are gone is removed. Without matplotlib the tables are
    written all the same, and a line on standard error says what is missing.

    Args:
        folder: holds ``results.csv``; for the loss curves ``curves.csv``; and ``open.csv``, if something is missing.

    Raises:
        ResultsError: a file is missing or garbled.
    """
    folder = Path(folder)
    ablation = Ablation.of(*read_results(folder / RESULTS))
    curves = read_curves(folder / CURVES).get("val_loss", {})
    plots: list[str] = []
    if missing := missing_packages(["matplotlib"]):
        print(f"No plots in {folder}: {needed('drawing', missing)}", file=sys.stderr)
    else:
        from lightning_asyncpp.tools.ablation.report.plots import write_plots

        plots = write_plots(folder, ablation, curves)
    write_whole(folder / TABLE, page(ablation, plots))


def main(argv: Sequence[str] | None = None) -> None:
    """Write the report of the folder named on the command line."""
    parser = ArgumentParser(
        allow_abbrev=False,
        prog="python -m lightning_asyncpp.tools.ablation.report",
        description="Tables and plots of an ablation.",
    )
    parser.add_argument("folder", type=Path, help=f"folder with {RESULTS} and {CURVES}")
    folder = parser.parse_args(argv).folder
    try:
        write_report(folder)
    except ResultsError as error:
        sys.exit(str(error))
    print(f"Wrote {folder / TABLE} and {len(list(folder.glob('*.svg')))} plots.")


if __name__ == "__main__":
    main()
