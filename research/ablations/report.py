"""Write the table and the pictures of ablations beside their CSV files."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from research.ablations.plots import write_plots
from research.ablations.results import read_curves, read_runs
from research.ablations.summary import Ablation
from research.ablations.tables import page


def write_report(folder: Path) -> None:
    """Write ``table.md`` and ``*.svg``."""
    ablation = Ablation.of(*read_runs(folder))
    plots = write_plots(folder, ablation, read_curves(folder))
    (folder / "table.md").write_text(page(ablation, plots), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """Write the reports of the folders named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m research.ablations.report", description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", help="with results.csv and curves.csv")
    for folder in parser.parse_args(argv).folders:
        write_report(folder)


if __name__ == "__main__":
    main()
