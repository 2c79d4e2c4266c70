"""docs/research/theory.md: its numbers are recomputed, and the tests that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.theory.tables import TABLES, Table

FOLDER = Path(__file__).parent
PAGE = (FOLDER.parents[1] / "docs" / "research" / "theory.md").read_text()


def rows_of(name: str) -> Table:
    """Rows of the table after the marker ``<!-- table: name -->``, header and rule left out."""
    _, _, after = PAGE.partition(f"<!-- table: {name} -->\n")
    lines = re.match(r"(?:\|.*\n)*", after.lstrip("\n"))
    assert lines is not None
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines.group().splitlines()[2:]]
    return {label: [float(number) for number in numbers] for label, *numbers in cells}


@pytest.mark.parametrize("name", TABLES)
def test_the_numbers_of_the_page_are_those_computed(name: str) -> None:
    page, computed = rows_of(name), TABLES[name]()
    assert list(page) == list(computed)
    for label, numbers in page.items():
        assert numbers == pytest.approx(computed[label], rel=0.03, abs=0.002), label


def test_every_table_of_the_page_is_checked() -> None:
    assert re.findall(r"<!-- table: (\w+) -->", PAGE) == list(TABLES)


def test_every_test_that_the_page_names_exists_and_no_test_goes_unnamed() -> None:
    defined = {
        name
        for path in FOLDER.glob("test_theory_*.py")
        if path != Path(__file__)
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert set(re.findall(r"`(test_\w+)`", PAGE)) == defined
