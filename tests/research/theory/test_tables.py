"""The tables of docs/research/theory.md are what the scripts compute, and every tested statement is on the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from research.theory.tables import TABLES

PAGE = (Path(__file__).parents[3] / "docs" / "research" / "theory.md").read_text()


@pytest.mark.parametrize("name", TABLES)
def test_the_numbers_of_the_page_are_those_computed(name: str) -> None:
    lines = PAGE.split(f"<!-- table: {name} -->\n")[1].split("\n\n")[0].splitlines()[2:]
    page = {label: [float(cell) for cell in cells] for label, *cells in (re.findall(r"[^|]+", line) for line in lines)}
    computed = TABLES[name]()
    assert [label.strip() for label in page] == list(computed)
    for numbers, expected in zip(page.values(), computed.values(), strict=True):
        assert numbers == pytest.approx(expected, rel=0.03, abs=0.002)


def test_every_table_and_tested_statement_is_on_the_page() -> None:
    assert re.findall(r"<!-- table: (\w+) -->", PAGE) == list(TABLES)
    tests = Path(__file__).with_name("test_statements.py").read_text()
    numbers = {".".join(pair) for pair in re.findall(r"(?:test|and)_(\d)_(\d)_", tests)}
    assert numbers <= set(re.findall(r"^\*\*(\d\.\d)\*\*", PAGE, re.MULTILINE))
