"""Parsers of the tools, and what they print: options with hyphens, or underscores; what is wrong in a line or two."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

import jsonargparse

from lightning_asyncpp.lightning_cli.help import advice

_UNRECOGNIZED = "unrecognized arguments: "


class _Options:
    """The options that a parser got."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def add(self, action: argparse.Action) -> None:
        self.names += [name for name in action.option_strings if name.startswith("--")]

    def hyphened(self, arguments: Sequence[str] | None) -> list[str]:
        """The arguments, with hyphens in the options that are these; of others the underscores are their own."""
        return [self._hyphened(argument) for argument in (sys.argv[1:] if arguments is None else arguments)]

    def _hyphened(self, argument: str) -> str:
        name, equals, value = argument.partition("=")
        meant = name.replace("_", "-")
        return meant + equals + value if name.startswith("--") and meant in self.names else argument

    def explained(self, message: str) -> str:
        """What is wrong; of options that do not exist, with the nearest."""
        words = message.removeprefix(_UNRECOGNIZED).split() if message.startswith(_UNRECOGNIZED) else []
        unknown = [word.partition("=")[0] for word in words if word.startswith("--")]
        return "\n".join(f"there is no option {name}{advice(name, self.names)}" for name in unknown) or message


class ToolParser(jsonargparse.ArgumentParser):
    """Of a tool whose arguments are all its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._options = _Options()
        # jsonargparse's own adds the types of Python, and "default: null" where a help says what is done then.
        super().__init__(*args, formatter_class=argparse.HelpFormatter, **kwargs)

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """Add an argument; its default goes into its help, unless that speaks of one."""
        told, default = kwargs.get("help", ""), kwargs.get("default")
        if default not in (None, "", argparse.SUPPRESS) and default is not False and "default" not in told:
            kwargs["help"] = f"{told} (default: {default})"
        action: argparse.Action = super().add_argument(*args, **kwargs)
        self._options.add(action)
        return action

    def parse_args(self, args: Sequence[str] | None = None, *rest: Any, **kwargs: Any) -> jsonargparse.Namespace:  # type: ignore[override]
        """Read the arguments."""
        return super().parse_args(self._options.hyphened(args), *rest, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """End with what is wrong; the usage would hide it."""
        _end(self.prog, self._options.explained(message))


class KnownPartParser(argparse.ArgumentParser):
    """Of a tool that may leave arguments which it does not know to another parser."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._options = _Options()
        super().__init__(*args, **kwargs)

    @property
    def option_names(self) -> list[str]:
        """Its options, without the leading hyphens."""
        return [name.removeprefix("--") for name in self._options.names]

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """Add an argument."""
        action = super().add_argument(*args, **kwargs)
        self._options.add(action)
        return action

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Read the arguments that are known."""
        return super().parse_known_args(self._options.hyphened(args), namespace)

    def error(self, message: str) -> NoReturn:
        """End with what is wrong; the usage would hide it."""
        _end(self.prog, self._options.explained(message))


def _end(program: str, said: str) -> NoReturn:
    sys.stderr.write(f"{program}: error: {said}\n(`{program} --help` lists the options)\n")
    sys.exit(2)


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
