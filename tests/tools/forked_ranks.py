"""Processes that tools start, from the tests' fork server: they need not import everything anew."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from lightning_asyncpp.tools.processes import Children
from tests import forked


class ForkedChildren(Children):
    """Runs ``python SCRIPT ARGUMENTS``, or with ``-m MODULE``, in a process that has imported the package."""

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        log = self.log(name)
        process = forked.start(command[1:], Path.cwd(), log, log, environment or {})
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
