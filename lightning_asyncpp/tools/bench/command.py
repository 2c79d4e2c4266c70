"""``asyncpp bench``: measures the pipeline against its rivals, and draws timelines."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from lightning_asyncpp.tools.subcommands import chosen

_COMMANDS = {  # by the name of their module
    "schedule": "utilisation of sleeping stages under every schedule",
    "compute": "gain when stages really compute",
    "network": "gain of a real training over a slow network (Linux, root)",
    "time-to-loss": "wall-clock time to a loss, with and without a flush",
    "optimizer": "step time of Muon and of Error Feedback",
    "draw": "draw the ideal timeline of a schedule",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``asyncpp bench <command> ...``."""
    if (given := chosen("bench", _COMMANDS, argv, kind="benchmark")) is None:
        return
    command, rest = given
    # Imported late: torch takes seconds, and a wrong command should not.
    importlib.import_module(f"lightning_asyncpp.tools.bench.{command.replace('-', '_')}").main(rest)


if __name__ == "__main__":
    main()
