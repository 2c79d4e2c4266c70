"""Runs a command that may hang: it ends within its limit, and so does all that it has started."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_asyncpp.tools.bench.processes import end_of, end_with_parent

_POLL_SECONDS = 0.1
KILL_SECONDS = 10.0
"""How long the kernel may take to end a process: one that waits in a driver may never do so."""


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        code: its exit code; ``None`` if it was stopped because its time was over.
        seconds: how long it ran.
        is_gone: whether it is really over, and all that it has started: the kernel cannot end a process that waits in
            a driver.
    """

    code: int | None
    seconds: float
    is_gone: bool = True


def run_limited(
    command: Sequence[str],
    log: Path,
    limit: float,
    tick: Callable[[], None] = lambda: None,
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Run a command in a session of its own; when it is over, whatever its end, nothing that it started is left.

    Args:
        command: to run.
        log: gets what it and its children print: a pipe would have to be waited for until the last of them is gone.
        limit: seconds after which it is killed.
        tick: is called again and again meanwhile.
        environment: variables to set besides this process's own.
    """
    started = time.monotonic()
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, **(environment or {})}, preexec_fn=end_with_parent,
        )  # fmt: skip
    try:
        while (code := process.poll()) is None and time.monotonic() - started < limit:
            tick()
            time.sleep(_POLL_SECONDS)
    finally:
        is_gone = _end(process)
    tick()
    return Ended(code, time.monotonic() - started, is_gone)


def _end(process: subprocess.Popen[bytes]) -> bool:
    """Kill a process and all that descends from it; whether they are gone."""
    deadline = time.monotonic() + KILL_SECONDS
    if process.poll() is None:
        _signal(process.pid, signal.SIGSTOP)  # it starts no more, and stays the parent of what it has started
    while (descendants := _descendants(process.pid)) and time.monotonic() < deadline:
        for pid in descendants:
            _signal(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # also those whose parent was gone before
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(_POLL_SECONDS, deadline - time.monotonic()))
    return process.poll() is not None and not descendants


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _descendants(pid: int) -> list[int]:
    """Processes that descend from one and still run, where the system tells (Linux)."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # "pid (name) state parent ...", and the name may have anything in it.
            state, parent, *_ = stat.read_text(errors="replace").rpartition(")")[2].split()
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(stat.parent.name))
    found, new = [], [pid]
    while new:
        new = [child for parent in new for child in children.get(parent, ())]
        found += new
    return found


def last_error(log: Path) -> str:
    """What a process said last of an error, in a line; else its last line."""
    lines = [line.strip() for line in end_of(log).splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"(Error|Exception)(: |$)", line) or line.startswith("asyncpp: ")]
    return (errors or lines or ["it said nothing"])[-1][:400]
