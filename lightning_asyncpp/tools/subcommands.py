"""Commands of a tool, such as ``asyncpp checkpoint info``: which was given, and what is said if none was."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from lightning_asyncpp.lightning_cli.nearest import advice


def chosen(
    tool: str, commands: Mapping[str, str], argv: Sequence[str] | None, arguments: str = ""
) -> tuple[str, list[str]] | None:
    """The command that was given, and its arguments; ``None`` after help was printed, for which none was needed.

    Args:
        tool: its name after ``asyncpp``.
        commands: name -> what it does.
        argv: the arguments of the tool; ``None``: those of the process.
        arguments: that every command takes, for the help.

    Raises:
        SystemExit: with code 2: there is no such command.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    lines = [f"  {name:<14}{text}" for name, text in commands.items()]
    usage = "\n".join([f"usage: asyncpp {tool} {{{','.join(commands)}}} {arguments}[--help] ...", "", *lines])
    if not given or given[0] in ("-h", "--help"):
        print(usage)
        return None
    command, *rest = given
    if command not in commands:
        said = f"asyncpp {tool}: error: there is no command {command!r}{advice(command, commands)}"
        print(f"{said}\n(`asyncpp {tool} --help` lists all)", file=sys.stderr)
        raise SystemExit(2)
    return command, rest
