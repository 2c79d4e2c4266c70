"""``asyncpp bench``: measures the pipeline against its rivals, and draws timelines."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

_COMMANDS = {  # by the name of their module
    "schedule": "utilisation of sleeping stages under every schedule",
    "compute": "gain when stages really compute",
    "optimizer": "step time of Muon and of Error Feedback",
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
    importlib.import_module(f"lightning_asyncpp.tools.bench.{command}").main(rest)


def _usage() -> str:
    lines = [f"  {name:<10}{text}" for name, text in _COMMANDS.items()]
    return "\n".join([f"usage: asyncpp bench {{{','.join(_COMMANDS)}}} [--help] ...", "", *lines])


if __name__ == "__main__":
    main()
