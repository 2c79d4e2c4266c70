"""Programs in forks of an interpreter that has imported Lightning and nothing of this package.

To import Lightning takes longer than most programs that tests run. What such a program imports of this package, or
forgets to, is found as in an interpreter of its own, and it ends as one does: with exit code, output and exit handlers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

# What a program has started holds its error output: one that outlives it is waited for, and noticed by that.
SERVER = """
import json, os, runpy, signal, sys, types
import lightning.fabric, lightning.pytorch, torchmetrics

assert "lightning_asyncpp" not in sys.modules
signal.signal(signal.SIGALRM, lambda *_: os.killpg(child, signal.SIGKILL))
for line in sys.stdin:
    how, program, folder, output, arguments, environment, seconds = json.loads(line)
    below, above = os.pipe()
    if not (child := os.fork()):
        break
    os.close(above)
    signal.alarm(seconds)
    with os.fdopen(below, encoding="utf-8", errors="replace") as errors:
        said = errors.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signal.alarm(0)
    print(json.dumps([code, said]), flush=True)
else:
    sys.exit()

os.setpgid(0, 0)
signal.signal(signal.SIGALRM, signal.SIG_DFL)
os.close(below)
for file, descriptor in (
    (os.open(os.devnull, os.O_RDONLY), 0), (os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 1), (above, 2)
):
    os.dup2(file, descriptor)
    os.close(file)
os.chdir(folder)
os.environ.update(environment)
sys.path[:1] = [os.path.dirname(os.path.abspath(program)) if how == "script" else folder]
sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
sys.argv = [program if how == "script" else "-c", *arguments]
if how == "script":
    runpy.run_path(program, run_name="__main__")
elif how == "module":
    runpy.run_module(program, run_name="__main__", alter_sys=True)
else:
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(program, "<string>", "exec"), vars(main))
"""
_servers: dict[int, subprocess.Popen[str]] = {}


class Ended(NamedTuple):
    """A program that has ended: its exit code (a signal's number, negative), and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def run(how: str, program: str, folder: Path, *arguments: str, seconds: int = 100, **environment: str) -> Ended:
    """Run a program; one that takes longer than ``seconds`` is killed, with what it has started.

    Args:
        how: ``"script"`` for a file, ``"module"`` for ``python -m``, ``"code"`` for ``python -c``.
        program: the file, the module's name, or the code.
        folder: that it runs in; its output is left there, too.
        arguments: of the program.
        environment: variables beside the test's own.
    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    output = folder / "forked.out"
    job: list[Any] = [how, program, str(folder), str(output), arguments, environment, seconds]
    print(json.dumps(job), file=server.stdin, flush=True)
    code, said = json.loads(server.stdout.readline())
    return Ended(code, output.read_text(encoding="utf-8"), said)


def _server() -> subprocess.Popen[str]:
    """The one of this process, which ends with it: nothing more is to be read."""
    if os.getpid() not in _servers:
        command = [sys.executable, "-c", SERVER]
        _servers[os.getpid()] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    return _servers[os.getpid()]
