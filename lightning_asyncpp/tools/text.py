"""What tools print and write: tables, measured quantities, JSON, and names that may be anything."""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Collection, Sequence
from typing import Any, TextIO


def columns(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Return rows as lines with columns of one width each, numbers to the right and some columns to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]


def escaped(text: str) -> str:
    """A text of a file, or a path, in one line: what would change the line, or the terminal, as its escape sequence."""
    return "".join(c if c.isprintable() or unicodedata.category(c) == "Zs" else _escape(c) for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def say(text: str, end: str = "\n", file: TextIO | None = None) -> None:
    """Print; what the output cannot encode, such as parts of a path that are no text, as its escape sequence."""
    file = sys.stdout if file is None else file
    encoding = getattr(file, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), end=end, file=file, flush=True)


def write_json(path: str, content: Any) -> None:
    """Write JSON that people can read too."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
