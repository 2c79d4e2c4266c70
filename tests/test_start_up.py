"""What an import brings along: a script that trains its own module waits for nothing that it does not use."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from lightning_asyncpp.cli import TOOLS
from lightning_asyncpp.lightning_cli.command import AsyncppCLI
from lightning_asyncpp.lightning_cli.help import GROUPS, SUBCOMMANDS
from lightning_asyncpp.tools.parsers import PARSERS

HEAVY = ("litdata", "boto3", "requests", "jsonargparse", "docstring_parser", "matplotlib", "pandas", "transformers")
PACKAGES = ("lightning_asyncpp", "lightning_asyncpp.fabric", "lightning_asyncpp.data")

# Runs programs, each in a fork of an interpreter that has imported nothing of this package: Lightning, or only what
# Lightning takes longest to import, which may come first or not.
FORKING = """
import json, os, sys
import torchmetrics
assert not [name for name in sys.modules if name.partition(".")[0] in ("lightning", "lightning_asyncpp")]

def run(code):
    if not (child := os.fork()):
        os.dup2(2, 1)
        exec(json.loads(code), {"sys": sys})
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

below, above = os.pipe()
if not os.fork():
    os.close(above)
    import lightning.fabric, lightning.pytorch
    for line in os.fdopen(below):
        run(line)
    os._exit(0)
os.close(below)
for line in sys.stdin:
    where, code = line.split(" ", 1)
    if where == "after":
        os.write(above, code.encode())
    else:
        run(code)
"""
Run = Callable[[str], None]


@pytest.fixture(scope="module")
def forking() -> Iterator[Callable[[str, str], None]]:
    """Runs a program; what it says is on the test's stderr."""
    command = [sys.executable, "-c", FORKING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def run(where: str, code: str) -> None:
            print(where, json.dumps(code), file=process.stdin, flush=True)
            assert process.stdout.readline() == "0\n"

        yield run
        process.kill()


@pytest.fixture
def after_lightning(forking: Callable[[str, str], None]) -> Run:
    """Runs a program after ``import lightning``."""
    return functools.partial(forking, "after")


@pytest.fixture
def before_lightning(forking: Callable[[str, str], None]) -> Run:
    """Runs a program where neither Lightning nor this package was imported."""
    return functools.partial(forking, "before")


@pytest.mark.parametrize("package", PACKAGES)
def test_an_import_brings_nothing_heavy_but_what_lightning_does(package: str, after_lightning: Run) -> None:
    after_lightning(
        f"before = set(sys.modules); import {package}\n"
        f"heavy = [name for name in {HEAVY!r} if name in set(sys.modules) - before]\n"
        "assert not heavy, heavy"
    )


COMMAND = """
import json, resource, sys
sys.argv = ["asyncpp", *json.loads(sys.argv[1])]
try:
    from lightning_asyncpp.cli import main

    main()
except SystemExit as end:
    code = end.code
used = resource.getrusage(resource.RUSAGE_SELF)
heavy = [name for name in ("torch", "lightning", "numpy") if name in sys.modules]
print(json.dumps([code or 0, used.ru_utime + used.ru_stime, heavy]), file=sys.stderr)
"""


def command(*arguments: str) -> tuple[int, float, list[str], str]:
    """Exit code and processor time of the command in a process of its own, the heavy packages, and what it printed."""
    program = [sys.executable, "-c", COMMAND, json.dumps(arguments)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=True)
    code, seconds, heavy = json.loads(done.stderr.splitlines()[-1])
    return code, seconds, heavy, done.stdout + done.stderr


def test_every_tool_has_a_parser_of_its_own() -> None:
    assert set(PARSERS) == set(TOOLS)


@pytest.mark.parametrize("name", ["", "checkpoint info", "fit", "validate", *PARSERS])
def test_help_waits_for_neither_torch_nor_lightning(name: str) -> None:
    code, seconds, heavy, printed = command(*name.split(), "--help")
    assert code == 0
    assert printed.startswith(f"usage: asyncpp {name}".strip()), printed
    assert not heavy
    assert seconds < 3  # less than one where nothing else runs


@pytest.mark.parametrize(
    ("arguments", "said"), [(["frob"], "there is no subcommand 'frob'"), ([], "before you train:")]
)
def test_a_wrong_name_is_refused_at_once(arguments: list[str], said: str) -> None:
    code, _, heavy, printed = command(*arguments)
    assert code == 2
    assert said in printed
    assert not heavy


def test_help_names_every_subcommand() -> None:
    assert list(SUBCOMMANDS) == list(AsyncppCLI.subcommands())
    assert sorted(name for commands in GROUPS.values() for name in commands) == sorted([*SUBCOMMANDS, *TOOLS])


def test_a_line_says_what_starts_before_torch_is_imported() -> None:
    """On the first rank alone."""
    program = (
        "import sys; sys.argv = ['asyncpp', 'fit', 'quickstart']\n"
        "class Stop:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name in ('torch', 'lightning'): sys.exit(7)\n"
        "sys.meta_path.insert(0, Stop())\n"
        "from lightning_asyncpp.cli import main; main()\n"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=os.environ | variables
        )
        for variables in ({"LOCAL_RANK": "0"}, {"LOCAL_RANK": "1"})
    ]
    assert [done.returncode for done in said] == [7, 7]
    assert [done.stderr for done in said] == ["asyncpp: fit: importing torch and Lightning ...\n", ""]


@pytest.mark.parametrize(
    "arguments",
    [["fit", "--help=full"], ["trace", "x"], ["import", "--", "--help"], ["-c", "x", "frob"]],
    ids=" ".join,
)
def test_whatever_does_more_than_help_has_the_whole_package(arguments: list[str], after_lightning: Run) -> None:
    """Its names, and the strategies in both registries, before anything else happens."""
    after_lightning(
        f"import sys; sys.argv = ['asyncpp', *{arguments!r}]\n"
        "import lightning_asyncpp, lightning.pytorch.strategies, lightning.fabric.strategies\n"
        "assert lightning_asyncpp.AsyncPipelineStrategy\n"
        "names = {'async_pipeline', 'sync_pipeline', 'delayed_gradient'}\n"
        "assert names <= set(lightning.pytorch.strategies.StrategyRegistry.available_strategies())\n"
        "assert names <= set(lightning.fabric.strategies.STRATEGY_REGISTRY.available_strategies())\n"
    )


@pytest.mark.parametrize("first", ["lightning_asyncpp", "lightning"])
def test_strategies_have_their_names_whatever_is_imported_first(
    first: str, before_lightning: Run, after_lightning: Run
) -> None:
    run = before_lightning if first == "lightning_asyncpp" else after_lightning
    run(
        "import lightning_asyncpp, lightning as L\n"
        "assert type(L.Trainer(strategy='async_pipeline', accelerator='cpu', devices=2, logger=False).strategy)"
        " is lightning_asyncpp.AsyncPipelineStrategy\n"
    )


def test_no_tool_is_imported_with_the_package(after_lightning: Run) -> None:
    after_lightning(
        "import sys, lightning_asyncpp\n"
        "tools = [name for name in sys.modules if name.startswith('lightning_asyncpp.tools')]\n"
        "assert not tools, tools\n"
        "assert lightning_asyncpp.check_model.__module__.startswith('lightning_asyncpp.tools.check')\n"
    )
