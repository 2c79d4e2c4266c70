"""Child processes that end with this one, in whatever way it ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.1
_GRACE_SECONDS = 3.0


class BenchmarkFailedError(RuntimeError):
    """A process of the benchmark failed, or all of them together took too long."""


@dataclass
class Children:
    """Processes that run at the same time; leaving the ``with`` block ends all of them.

    Attributes:
        folder: gets their logs.
    """

    folder: Path
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start a command in a session of its own: an interrupt from the keyboard reaches this process alone.

        Args:
            name: of the process, in messages and of its log.
            command: to run.
            environment: variables to set besides this process's own.
        """
        with open(self.log(name), "wb") as log:
            self._running[name] = subprocess.Popen(
                command,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    def log(self, name: str) -> Path:
        """What a process prints."""
        return self.folder / f"{name}.log"

    def ended(self, name: str) -> bool:
        """Whether a process is over."""
        return self._running[name].poll() is not None

    def wait(self, deadline: float, tick: Callable[[], None] = lambda: None) -> str | None:
        """Until all have ended well or one has not; return the name of that one.

        Args:
            deadline: by ``time.monotonic``.
            tick: is called again and again meanwhile.

        Raises:
            BenchmarkFailedError: they take longer.
        """
        while True:
            tick()
            codes = {name: process.poll() for name, process in self._running.items()}
            failed = next((name for name, code in codes.items() if code), None)
            if failed is not None or all(code == 0 for code in codes.values()):
                return failed
            if time.monotonic() > deadline:
                raise BenchmarkFailedError(
                    "the benchmark took longer than --timeout: raise it, or run fewer mini-batches"
                )
            time.sleep(_POLL_SECONDS)

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._running.values():  # torchrun's workers are in sessions of their own: it ends them itself
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + _GRACE_SECONDS
        for process in self._running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + _GRACE_SECONDS
        for process in self._running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits in a driver may never end
                process.wait(max(0.0, deadline - time.monotonic()))


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, where the kernel can (Linux)."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_of(log: Path, characters: int = 4000) -> str:
    """The last ``characters`` of a log; empty if there is none."""
    return log.read_text(errors="replace")[-characters:] if log.exists() else ""


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
