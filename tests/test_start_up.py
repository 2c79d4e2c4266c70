"""Imports and commands load no heavy package that they do not use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_asyncpp import __version__
from lightning_asyncpp.cli import TOOLS
from lightning_asyncpp.lightning_cli.arguments import package_recipes
from lightning_asyncpp.lightning_cli.command import AsyncppCLI
from lightning_asyncpp.lightning_cli.help import GROUPS, SUBCOMMANDS
from lightning_asyncpp.tools import parsers
from tests.helpers import programs as forked

HEAVY = ("litdata", "boto3", "requests", "jsonargparse", "docstring_parser", "matplotlib", "pandas", "transformers")
REGISTERED = "type(L.Trainer(strategy='async_pipeline', accelerator='cpu', devices=2, logger=False).strategy)"


def run(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a new interpreter."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | environment)


def test_an_import_brings_nothing_heavy_but_what_lightning_does(tmp_path: Path) -> None:
    """No tool is imported; strategies have names even if Lightning was imported first. Both are imported anew here."""
    anew = ("lightning", "lightning_asyncpp", *HEAVY)
    program = (
        "import sys\n"
        f"for name in [name for name in sys.modules if name.partition('.')[0] in {anew!r}]: del sys.modules[name]\n"
        "import lightning as L, lightning.fabric, lightning.pytorch; before = set(sys.modules)\n"
        "import lightning_asyncpp, lightning_asyncpp.fabric, lightning_asyncpp.data\n"
        "new = set(sys.modules) - before\n"
        f"heavy = [name for name in new if name in {HEAVY!r} or name.startswith('lightning_asyncpp.tools')]\n"
        "assert not heavy, heavy\n"
        "assert lightning_asyncpp.check_model.__module__.startswith('lightning_asyncpp.tools.check')\n"
        f"assert {REGISTERED} is lightning_asyncpp.AsyncPipelineStrategy\n"
    )
    done = forked.run(["-c", program], tmp_path)
    assert done.returncode == 0, done.stderr


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


@pytest.mark.parametrize(
    ("given", "code", "answer"),
    [
        *((f"{name} --help", 0, f"usage: asyncpp {name}".strip()) for name in ("", "fit", "checkpoint info", "check")),
        ("frob", 2, "asyncpp: error: there is no subcommand 'frob'"),
        ("--version", 0, f"asyncpp {__version__} (torch "),
        ("recipes", 0, f"{next(iter(package_recipes()))} "),
    ],
)
def test_what_needs_neither_torch_nor_lightning_does_not_wait_for_them(given: str, code: int, answer: str) -> None:
    done = run(COMMAND, json.dumps(given.split()))
    ended, seconds, heavy = json.loads(done.stderr.splitlines()[-1])
    assert (ended, heavy) == (code, [])
    assert (done.stdout + done.stderr).startswith(answer)
    assert seconds < 3  # less than 1 s on an idle machine


def test_help_names_every_subcommand() -> None:
    assert all(hasattr(parsers, f"{name}_parser") for name in TOOLS)
    assert list(SUBCOMMANDS) == list(AsyncppCLI.subcommands())
    assert sorted(name for commands in GROUPS.values() for name in commands) == sorted([*SUBCOMMANDS, *TOOLS])


def test_a_line_tells_what_starts_before_torch_is_imported() -> None:
    """Only the first rank prints the line."""
    program = (
        "import sys; sys.argv = ['asyncpp', 'fit', 'quickstart']\n"
        "class Stop:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name in ('torch', 'lightning'): sys.exit(7)\n"
        "sys.meta_path.insert(0, Stop())\n"
        "from lightning_asyncpp.cli import main; main()\n"
    )
    first, second = (run(program, LOCAL_RANK=rank) for rank in "01")
    assert (first.returncode, second.returncode) == (7, 7)
    assert (first.stderr, second.stderr) == ("asyncpp: fit: importing torch and Lightning ...\n", "")
