"""Tables of ablations inside a page of the documentation, made again from the CSV files so that they cannot go stale.

A page holds pairs of lines

    <!-- table: FOLDER#main -->
    <!-- end of table -->

FOLDER, relative to the page, holds ``results.csv``; after ``#`` stands the name of a table: main, corrections, equal,
delays or search.
``python docs/embed_tables.py PAGE`` replaces what is between them; ``--check`` only compares. What all tables of a kind
have below them, stands below the first one alone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser

from lightning_asyncpp.tools.ablation.report.summary import Ablation
from lightning_asyncpp.tools.ablation.report.tables import TABLES, Definitions
from lightning_asyncpp.tools.ablation.results import RESULTS, ResultsError, read_results

END = "<!-- end of table -->"
_START = re.compile(r"<!-- table: (?P<folder>[^#]*?)(?:#(?P<table>.*?))? -->")


class PageError(ValueError):
    """A page whose markers cannot be followed; the message names the file and line."""


def embed(page: Path) -> bool:
    """Write every marked table of a page again.

    Args:
        page: a Markdown file.

    Returns:
        Whether the page changed.

    Raises:
        PageError: a marker is not closed, or names a table or folder that is not there; all problems at once.
    """
    old = page.read_text(encoding="utf-8")
    new = embedded(page)
    if new != old:
        page.write_text(new, encoding="utf-8")
    return new != old


def embedded(page: Path) -> str:
    """The text of the page with every table made again; nothing is written. Arguments and errors: see `embed`."""
    problems: list[str] = []
    lines: list[str] = []
    opened: int | None = None
    definitions = Definitions()
    for number, line in enumerate(page.read_text(encoding="utf-8").split("\n"), start=1):
        start = _START.fullmatch(line.strip())
        if start is not None and opened is not None:
            problems.append(f'{page}:{opened}: no line "{END}" before the next table')
        if line.strip() == END and opened is None:
            problems.append(f"{page}:{number}: ends a table that was not begun")
        if start is not None:
            opened = number
            text = _table(f"{page}:{number}", page.parent, start["folder"], start["table"], problems)
            lines += [line, "", *definitions.below(start["table"], text).splitlines(), ""]
        elif line.strip() == END:
            opened = None
        if opened is None:
            lines.append(line)
    if opened is not None:
        problems.append(f'{page}:{opened}: no line "{END}" after it')
    if problems:
        raise PageError("\n".join(problems))
    return "\n".join(lines)


def _table(place: str, root: Path, folder: str, table: str | None, problems: list[str]) -> str:
    """A table with its notes; what is wrong goes to ``problems``."""
    if table is None or table not in TABLES:
        problems.append(f'{place}: no table "{table or ""}"; expected FOLDER#TABLE, TABLE one of {", ".join(TABLES)}')
        return ""
    try:
        text = TABLES[table](Ablation.of(*read_results(root / folder / RESULTS)))
    except ResultsError as error:
        problems.append(f"{place}: {error}")
        return ""
    if not text:
        problems.append(f'{place}: {root / folder / RESULTS} has no runs for the table "{table}"')
    return text


def main(argv: Sequence[str] | None = None) -> None:
    """Embed into the pages named on the command line, or check them."""
    parser = ArgumentParser(
        allow_abbrev=False,
        prog="python docs/embed_tables.py",
        description="Ablation tables in pages of documentation.",
    )
    parser.add_argument("pages", type=Path, nargs="+", help="Markdown files")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    arguments = parser.parse_args(argv)
    try:
        changed = [page for page in arguments.pages if (_stale if arguments.check else embed)(page)]
    except (PageError, OSError) as error:
        sys.exit(str(error))
    for page in changed:
        print(f"{page}: {'out of date' if arguments.check else 'tables written again'}")
    if arguments.check and changed:
        sys.exit(f"Run `python docs/embed_tables.py {' '.join(map(str, changed))}`.")


def _stale(page: Path) -> bool:
    return embedded(page) != page.read_text(encoding="utf-8")


if __name__ == "__main__":
    main()
