"""The tables of research/notes/theory.md are what the scripts compute, and every tested statement is on the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from research.theory.tables import TABLES

TABLE = re.compile(r"<!-- table: (\w+) -->")
ROOT = Path(__file__).parents[3]
PROOFS = ROOT / "research" / "notes" / "theory.md"


@pytest.mark.parametrize("name", TABLE.findall(PROOFS.read_text()))
def test_the_numbers_of_the_page_are_those_computed(name: str) -> None:
    lines = PROOFS.read_text().split(f"<!-- table: {name} -->\n")[1].split("\n\n")[0].splitlines()[2:]
    rows = {label: [float(cell) for cell in cells] for label, *cells in (re.findall(r"[^|]+", line) for line in lines)}
    computed = TABLES[name]()
    assert [label.strip() for label in rows] == list(computed)
    tolerance = 0.03 if name == "orbits" else 0.005  # a run that never settles depends on rounding
    for numbers, expected in zip(rows.values(), computed.values(), strict=True):
        assert numbers == pytest.approx(expected, rel=tolerance, abs=0.0005)


def test_every_table_and_tested_statement_is_on_the_page() -> None:
    page = PROOFS.read_text()
    assert TABLE.findall(page) == list(TABLES)
    tests = Path(__file__).with_name("test_statements.py").read_text()
    numbers = {".".join(pair) for pair in re.findall(r"(?:test|and)_(\d)_(\d)_", tests)}
    assert numbers <= set(re.findall(r"^\*\*(\d\.\d)\*\*", page, re.MULTILINE))
