"""Every message that a page of fixes quotes is one that the package prints."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "docs" / "guides" / "troubleshooting.md"]


def texts(path: Path) -> set[str]:
    """The strings of a file, docstrings aside; what is filled in is left out."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            found.add("\0".join(str(part.value) for part in node.values if isinstance(part, ast.Constant)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def quoted(page: Path) -> list[str]:
    """The code in the first column of tables whose header says ``message``."""
    messages: list[str] = []
    for table in re.findall(r"(?m)^\| message \|.*\n\|.*\n((?:\|.*\n)+)", page.read_text(encoding="utf-8")):
        for row in table.splitlines():
            messages += re.findall(r"`(.+?)`", row.split(" | ")[0])
    return messages


@pytest.fixture(scope="module")
def printed() -> str:
    files = (ROOT / "lightning_asyncpp").rglob("*.py")
    return "\n".join(sorted(set().union(*(texts(path) for path in files))))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_messages_exist(page: Path, printed: str) -> None:
    unknown = []
    for message in quoted(page):
        parts = [part.strip(" :") for part in re.split(r"\.\.\.|\[\.\.\.\]", message) if part.strip(" :=[]")]
        if not all(part in printed for part in parts):
            unknown.append((message, [part for part in parts if part not in printed]))
    assert len(quoted(page)) >= 8
    assert not unknown
