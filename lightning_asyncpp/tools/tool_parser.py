"""Parsers of the tools: options with hyphens, or underscores; what is wrong in a line or two."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import jsonargparse

from lightning_asyncpp.lightning_cli.nearest import advice

_REQUIRED = "the following arguments are required: "
_WRONG_VALUE = re.compile(r'Parser key "(\w+)":')
_REASON = re.compile(r"^\s*(?:- )?((?:Not of type|Expected) .*)$", re.MULTILINE)
_UNRECOGNIZED = "unrecognized arguments: "
_RESTRICTED = {  # types of jsonargparse -> what they take
    "PositiveInt": "a whole number, 1 or more",
    "NonNegativeInt": "a whole number, 0 or more",
    "PositiveFloat": "a number above 0",
    "NonNegativeFloat": "a number, 0 or more",
}
_RESTRICTION = re.compile(r"Not of type (\w+): (?:(\S+) does not conform)?")
_NUMBER = re.compile(r"-[\d.]")


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
        if found := _WRONG_VALUE.match(message):
            return self._wrong_value(found.group(1), message)
        if message.startswith(_REQUIRED):
            missing = message.removeprefix(_REQUIRED).split(", ")
            return f"missing: {', '.join(map(self._as_given, missing))}"
        if not message.startswith(_UNRECOGNIZED):
            return message
        words = message.removeprefix(_UNRECOGNIZED).split()
        unknown = [word.partition("=")[0] for word in words if word.startswith("-") and not _NUMBER.match(word)]
        return "\n".join(f"there is no option {name}{advice(name, self.names)}" for name in unknown) or message

    def _wrong_value(self, name: str, message: str) -> str:
        """What jsonargparse says of a value, without the types that it tried in vain and the absence of one."""
        reasons = [line for line in _REASON.findall(message) if "NoneType" not in line]
        value = message.partition("Given value: ")[2]
        given = f"{self._as_given(name)} {value}".strip()
        if (found := _RESTRICTION.search(message)) and (takes := _RESTRICTED.get(found[1])):
            return f"{given}: must be {takes}{f', got {found[2]}' if found[2] and not value else ''}"
        return f"{given}: {'; '.join(reasons)}" if reasons else message

    def _as_given(self, name: str) -> str:
        option = f"--{name.replace('_', '-')}"
        return option if option in self.names else name


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
