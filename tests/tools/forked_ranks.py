"""Processes that tools start, from the tests' fork server: they need not import everything anew."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

from lightning_asyncpp.tools.processes import Children
from tests.workers import end_with_parent, worker_context


class ForkedChildren(Children):
    """Runs ``python SCRIPT ARGUMENTS``, or with ``-m MODULE``, in a process that has imported the package."""

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        process = worker_context().Process(
            target=_run_script, args=(list(command[1:]), str(self.log(name)), dict(environment or {}))
        )
        process.start()
        self._running[name] = cast("subprocess.Popen[bytes]", _LikePopen(process))


class _LikePopen:
    """What is asked of a ``subprocess.Popen``."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid, self.terminate = process.pid, process.terminate

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("a forked rank", timeout)
        return code


def _run_script(arguments: list[str], log: str, environment: dict[str, str]) -> None:
    os.setsid()
    end_with_parent()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = (
        os.fdopen(1, "w", buffering=1, closefd=False),
        os.fdopen(2, "w", buffering=1, closefd=False),
    )
    os.environ.update(environment)
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
