"""``asyncpp bench``: measures the pipeline against its rivals, and draws timelines."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

_COMMANDS = {  # by the name of their module
    "schedule": "utilisation of sleeping stages under every schedule",
    "compute": "gain when stages really compute",
    "network": "gain of a real training over a slow network (Linux, root)",
    "time-to-loss": "wall-clock time to a loss, with and without a flush",
    "draw": "draw the ideal timeline of a schedule",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``asyncpp bench <command> ...``."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return
    command, *rest = arguments
    if command not in _COMMANDS:
        print(f"{_usage()}\nasyncpp bench: error: unknown benchmark {command!r}", file=sys.stderr)
        raise SystemExit(2)
    # Imported late: torch takes seconds, and a wrong command should not.
    importlib.import_module(f"lightning_asyncpp.tools.bench.{command.replace('-', '_')}").main(rest)


def _usage() -> str:
    lines = [f"  {name:<14}{text}" for name, text in _COMMANDS.items()]
    return "\n".join([f"usage: asyncpp bench {{{','.join(_COMMANDS)}}} [--help] ...", "", *lines])


if __name__ == "__main__":
    main()
