"""``asyncpp bench``: measures the pipeline against its rivals, and draws timelines."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from lightning_asyncpp.tools.bench.parsers import given_command


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``asyncpp bench <command> ...``."""
    if (given := given_command(argv)) is None:
        return
    command, rest = given
    # Imported late: torch takes seconds, and a wrong command should not.
    importlib.import_module(f"lightning_asyncpp.tools.bench.{command.replace('-', '_')}").main(rest)


if __name__ == "__main__":
    main()
