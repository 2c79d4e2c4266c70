"""What tools print and write: tables and JSON."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any


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


def write_json(path: str, content: Any) -> None:
    """Write JSON that people can read too."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
