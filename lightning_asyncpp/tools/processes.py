"""Child processes that end with this one, in whatever way it ends, and commands that may hang.

``python processes.py TIME MODULE ARGUMENTS`` runs a module as ``python -m`` does; at that time, by ``time.time()``, it
prints where each of its threads is. So this file imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.1
_GRACE_SECONDS = 3.0
KILL_SECONDS = 10.0
"""How long the kernel may take to end a process: one that waits in a driver may never do so."""


@dataclass
class Children:
    """Processes that run at the same time; leaving the ``with`` block ends all of them.

    Attributes:
        folder: gets their logs.
    """

    folder: Path
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start a command, as :func:`started` does; ``name`` is that of the process, in messages and of its log."""
        self._running[name] = started(command, self.log(name), environment)

    def log(self, name: str) -> Path:
        """What a process prints."""
        return self.folder / f"{name}.log"

    def ended(self, name: str) -> bool:
        """Whether a process is over."""
        return self._running[name].poll() is not None

    def wait(self, seconds: float, tick: Callable[[], None] = lambda: None) -> str | None:
        """Until all have ended well or one has not; return the name of that one.

        Args:
            seconds: that they may take from now on.
            tick: is called again and again meanwhile.

        Raises:
            TimeoutError: they take longer.
        """
        deadline = time.monotonic() + seconds
        while True:
            tick()
            codes = {name: process.poll() for name, process in self._running.items()}
            failed = next((name for name, code in codes.items() if code), None)
            if failed is not None or all(code == 0 for code in codes.values()):
                return failed
            if time.monotonic() > deadline:
                raise TimeoutError(f"no end within {seconds:.0f} s")
            time.sleep(_POLL_SECONDS)

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._running.values():
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + _GRACE_SECONDS
        for process in self._running.values():  # torchrun ends its workers by itself
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        deadline = time.monotonic() + _GRACE_SECONDS
        for process in self._running.values():
            end_tree(process, deadline)


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
    """Run a command that may hang; when it is over, whatever its end, nothing that it started is left.

    Args:
        command: to run.
        log: gets what it and its children print: a pipe would have to be waited for until the last of them is gone.
        limit: seconds after which it is killed.
        tick: is called again and again meanwhile.
        environment: variables to set besides this process's own.
    """
    start = time.monotonic()
    process = started(command, log, environment)
    try:
        while (code := process.poll()) is None and time.monotonic() - start < limit:
            tick()
            time.sleep(_POLL_SECONDS)
    finally:
        is_gone = end_tree(process, time.monotonic() + KILL_SECONDS)
    tick()
    return Ended(code, time.monotonic() - start, is_gone)


def started(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own: an interrupt from the keyboard reaches this process alone.

    Args:
        command: to run; it ends with this process.
        log: gets what it prints.
        environment: variables to set besides this process's own.
    """
    with log.open("wb") as output:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, **(environment or {})}, preexec_fn=end_with_parent,
        )  # fmt: skip


def end_with_parent() -> bool:
    """Let the kernel kill this process when its parent ends; whether it will (Linux)."""
    with contextlib.suppress(AttributeError):  # macOS
        return bool(ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0)
    return False


def end_tree(process: subprocess.Popen[bytes], deadline: float) -> bool:
    """Kill a process and all that descends from it; whether they are gone by ``deadline``, by ``time.monotonic``."""
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


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """Turn SIGTERM, and the end of the terminal, into SystemExit meanwhile, so that ``finally`` and ``with`` clean up.

    Only in the main thread; what is ignored, as by ``nohup``, stays so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(signum: int, _: object) -> None:
        raise SystemExit(128 + signum)

    signals = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = [signal.signal(number, leave) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


def end_of(log: Path, characters: int = 4000) -> str:
    """The last ``characters`` of a log; empty if there is none."""
    return log.read_text(errors="replace")[-characters:] if log.exists() else ""


def last_error(log: Path) -> str:
    """What a process said last of an error, in a line; else its last line."""
    lines = [line.strip() for line in end_of(log).splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"(Error|Exception)(: |$)", line) or line.startswith("asyncpp: ")]
    return (errors or lines or ["it said nothing"])[-1][:400]


def free_port() -> int:
    """A port that nobody uses on this machine now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_environment(rank: int, ranks: int, per_host: int) -> dict[str, str]:
    """The variables by which torchrun tells a process which rank it is."""
    host, local_rank = divmod(rank, per_host)
    places = {"RANK": rank, "LOCAL_RANK": local_rank, "NODE_RANK": host, "GROUP_RANK": host}
    return {name: str(value) for name, value in {**places, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": per_host}.items()}


def traced(seconds: float, module: str, *arguments: str) -> list[str]:
    """A command that runs a module, and prints where its threads are if it is not over in ``seconds`` from now on."""
    return [sys.executable, __file__, str(time.time() + seconds), module, *arguments]


def _run_traced(until: float, module: str, arguments: Sequence[str]) -> None:
    faulthandler.dump_traceback_later(max(0.1, until - time.time()), exit=False)
    if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
        sys.path[0] = os.getcwd()  # as ``python -m`` has it
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run_traced(float(sys.argv[1]), sys.argv[2], sys.argv[3:])
