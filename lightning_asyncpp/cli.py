"""The ``asyncpp`` command: which tools there are, and how it ends; nothing heavy is imported before it has to be."""

from __future__ import annotations

import importlib
import pkgutil
import platform
import sys
from collections.abc import Sequence

from lightning_asyncpp.dependencies import installed_versions
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.lightning_cli.arguments import find_own_modules, written_out
from lightning_asyncpp.lightning_cli.help import FULL_HELP, GROUPS, SUBCOMMANDS, did_you_mean, help_of, overview
from lightning_asyncpp.lightning_cli.messages import end_with, refuse, say
from lightning_asyncpp.version import __version__

__all__ = ["TOOLS", "main", "run"]

_LIGHTNING = "lightning_asyncpp.lightning_cli.command"
# subcommand -> the function that runs it with its arguments
TOOLS = {
    "check": "lightning_asyncpp.tools.check.check:main",
    "checkpoint": "lightning_asyncpp.tools.checkpoint:main",
    "doctor": "lightning_asyncpp.tools.doctor:main",
    "export": "lightning_asyncpp.tools.export:main",
    "generate": "lightning_asyncpp.tools.generate:main",
    "import": "lightning_asyncpp.tools.export:import_folder",
    "plan": "lightning_asyncpp.tools.plan.plan:main",
    "prepare": "lightning_asyncpp.tools.prepare:main",
    "recipes": "lightning_asyncpp.tools.recipes:main",
    "trace": "lightning_asyncpp.tools.trace:main",
}

_HELP = frozenset({"-h", "--help"})


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command.

    Args:
        arguments: what follows ``asyncpp``; default: those of the process.

    Raises:
        SystemExit: something is wrong with them, or went wrong on another rank; what, stands on the standard error
            output.
        Exception: what code of others raised.
    """
    try:
        run(arguments)
    except Exception as error:
        end_with(error)
        raise


def run(arguments: Sequence[str] | None = None) -> None:
    """Run the command, in a process that wants to know why it cannot be run.

    Raises:
        ConfigurationError: what was asked for does not fit together.
        SystemExit: it cannot even be read.
    """
    if arguments is not None:
        sys.argv = [sys.argv[0], *arguments]
    find_own_modules()
    given = sys.argv[1:]
    answer_help(given)
    if given[0] in TOOLS:
        try:
            pkgutil.resolve_name(TOOLS[given[0]])(given[1:])
        except (OSError, ImportError) as error:  # of a file, or a package, that is not there
            raise ConfigurationError(str(error)) from error
    else:
        sys.argv[1:] = ["--help" if argument == FULL_HELP else argument for argument in given]
        importlib.import_module(_LIGHTNING).run()


def answer_help(given: Sequence[str]) -> None:
    """End with what can be said without torch and Lightning; return if there is more to do.

    That is the help of the command, of its subcommands and of its tools, its version, what is wrong with a subcommand's
    name, and all of ``asyncpp recipes``; the list of all options of Lightning's own subcommands is Lightning's.

    Args:
        given: what follows ``asyncpp``.

    Raises:
        SystemExit: it was said.
    """
    if not given:
        sys.stderr.write(overview())
        sys.exit(2)  # nothing was done: a script that lost its arguments is told so
    _answer_version(given)
    name = given[0]
    if name in _HELP:
        print(overview(), end="")
        sys.exit()
    if not name.startswith("-") and name not in SUBCOMMANDS and name not in TOOLS:
        hint = did_you_mean(name, [command for commands in GROUPS.values() for command in commands])
        sys.stderr.write(f"asyncpp: error: there is no subcommand {name!r}{hint}\n(`asyncpp --help` lists all)\n")
        sys.exit(2)
    _answer_recipes(given)
    if not _HELP.intersection(given):
        return
    if name in TOOLS:
        from lightning_asyncpp.tools.parsers import PARSERS

        PARSERS[name]().parse_args(given[1:])
    elif name in SUBCOMMANDS:
        print(help_of(name), end="")
        sys.exit()


def _answer_version(given: Sequence[str]) -> None:
    if list(given[:1]) == ["--version"]:
        others = {**installed_versions(("torch", "lightning")), "Python": platform.python_version()}
        print(f"asyncpp {__version__} ({', '.join(f'{name} {version}' for name, version in others.items())})")
        sys.exit()


def _answer_recipes(given: Sequence[str]) -> None:
    if given[0] != "recipes":
        return
    try:
        pkgutil.resolve_name(TOOLS["recipes"])(given[1:])
    except (ConfigurationError, OSError) as error:
        refuse(error)
    sys.exit()


def announce(given: Sequence[str]) -> None:
    """Say what starts, before the seconds in which torch and Lightning are imported.

    Args:
        given: what follows ``asyncpp``.

    Raises:
        SystemExit: there is no recipe that it names.
    """
    if given and given[0] in (*SUBCOMMANDS, "check", "plan"):
        try:
            written_out(given)
        except ConfigurationError as error:
            refuse(error)
        say(f"{given[0]}: importing torch and Lightning ...")
