"""The ``asyncpp`` command; torch and Lightning are imported only when needed."""

from __future__ import annotations

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

# subcommand -> function that runs it with its arguments
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
        arguments: arguments after ``asyncpp``; default: those of the process.

    Raises:
        SystemExit: this package refused the arguments, or reported that the run failed; stderr has the reason.
        Exception: an error of the user's or a library's code.
    """
    try:
        run(arguments)
    except Exception as error:
        end_with(error)
        raise


def run(arguments: Sequence[str] | None = None) -> None:
    """Run the command; raise an error of the settings instead of ending the process.

    Raises:
        ConfigurationError: the settings do not fit together, or a file or package is missing.
        SystemExit: the command line cannot be parsed, or :func:`answer_help` answered it.
    """
    if arguments is not None:
        sys.argv = [sys.argv[0], *arguments]
    find_own_modules()
    given = sys.argv[1:]
    answer_help(given)
    if given[0] in TOOLS:
        try:
            pkgutil.resolve_name(TOOLS[given[0]])(given[1:])
        except (OSError, ImportError) as error:  # a missing file or package
            raise ConfigurationError(str(error)) from error
    else:
        sys.argv[1:] = ["--help" if argument == FULL_HELP else argument for argument in given]
        from lightning_asyncpp.lightning_cli import command

        command.run()


def answer_help(given: Sequence[str]) -> None:
    """Answer a command that needs neither torch nor Lightning, and end the process; otherwise do nothing.

    Such commands are those that ask for help (except ``--help=full``, which needs Lightning), ``--version``, missing or
    unknown subcommands and ``asyncpp recipes``.

    Args:
        given: arguments after ``asyncpp``.

    Raises:
        SystemExit: the command was answered.
    """
    if not given:
        sys.stderr.write(overview())
        sys.exit(2)  # so that a script that lost its arguments fails
    name = given[0]
    if name == "--version":
        others = {**installed_versions(("torch", "lightning")), "Python": platform.python_version()}
        print(f"asyncpp {__version__} ({', '.join(f'{name} {version}' for name, version in others.items())})")
        sys.exit()
    if name in _HELP:
        print(overview(), end="")
        sys.exit()
    if not name.startswith("-") and name not in SUBCOMMANDS and name not in TOOLS:
        hint = did_you_mean(name, [command for commands in GROUPS.values() for command in commands])
        sys.stderr.write(f"asyncpp: error: there is no subcommand {name!r}{hint}\n(`asyncpp --help` lists all)\n")
        sys.exit(2)
    if name == "recipes":
        try:
            pkgutil.resolve_name(TOOLS[name])(given[1:])
        except (ConfigurationError, OSError) as error:
            refuse(error)
        sys.exit()
    if not _HELP.intersection(given):
        return
    if name in TOOLS:
        pkgutil.resolve_name(f"lightning_asyncpp.tools.parsers:{name}_parser")().parse_args(given[1:])
    elif name in SUBCOMMANDS:
        print(help_of(name), end="")
        sys.exit()


def announce(given: Sequence[str]) -> None:
    """Print which subcommand starts, since importing torch and Lightning takes seconds.

    Args:
        given: arguments after ``asyncpp``.

    Raises:
        SystemExit: the arguments name an unknown recipe.
    """
    if given and given[0] in (*SUBCOMMANDS, "check", "plan"):
        try:
            written_out(given)
        except ConfigurationError as error:
            refuse(error)
        say(f"{given[0]}: importing torch and Lightning ...")
