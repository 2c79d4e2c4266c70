"""Tables of ablations inside a page, made again from the CSV files so that they cannot go stale.

A page holds pairs of lines

    <!-- table: FOLDER#main -->
    <!-- end of table -->

FOLDER, relative to the page, holds ``results.csv``; after ``#`` stands the name of a table: main, corrections, equal,
delays, sides or search. ``python -m research.ablations.embed PAGE`` replaces what is between them. What all tables of a
kind have below them, stands below the first one alone.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from research.ablations.results import read_runs
from research.ablations.summary import Ablation
from research.ablations.tables import TABLES, Definitions

_TABLE = re.compile(r"(<!-- table: ([^#\n]+)#(\w+) -->\n).*?(<!-- end of table -->)", re.S)


def embedded(page: Path) -> str:
    """Return the text of the page with every table made again; nothing is written."""
    definitions = Definitions()

    def table(found: re.Match[str]) -> str:
        start, folder, kind, end = found.groups()
        text = TABLES[kind](Ablation.of(*read_runs(page.parent / folder)))
        return f"{start}\n{definitions.below(kind, text)}\n\n{end}"

    return _TABLE.sub(table, page.read_text(encoding="utf-8"))


def main(argv: Sequence[str] | None = None) -> None:
    """Embed into the pages named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m research.ablations.embed", description="Ablation tables in pages.")
    parser.add_argument("pages", type=Path, nargs="+", help="Markdown files")
    for page in parser.parse_args(argv).pages:
        page.write_text(embedded(page), encoding="utf-8")


if __name__ == "__main__":
    main()
