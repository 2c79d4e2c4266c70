"""Fault injection into system calls: in a separate process, a chosen call fails or ends the process."""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.helpers.pool import worker_context

COUNT, FAIL, KILL = range(3)


class Fault(NamedTuple):
    """Fault in Python's system calls below ``folder``: call number ``at`` fails or ends the process.

    The first call has the number 1. A write that ends the process first writes half of its data.
    """

    folder: Path
    mode: int = COUNT
    at: int = 0
    error: int = errno.ENOSPC


class Call(NamedTuple):
    """Record of a system call: what it does, its path, and the new path if it is a rename."""

    what: str
    path: str
    target: str = ""


class Ended(NamedTuple):
    """Outcome of a process: 0 if the function returned, 1 if it raised, or ``-SIGKILL``; the error; the calls."""

    code: int | None
    raised: str
    calls: list[Call]


def run(fault: Fault, function: Callable[..., Any], *args: Any) -> Ended:
    """Call a function in a separate process in which the fault is injected, and return the outcome."""
    log, raised = (fault.folder.with_name(f"{fault.folder.name}.{name}") for name in ("calls", "raised"))
    for file in (log, raised):
        file.write_text("")
    process = worker_context().Process(target=_call, args=(fault, log, raised, function, args), daemon=True)
    process.start()
    process.join(60)
    assert not process.is_alive(), f"{function.__name__} does not end under {fault}"
    calls = [Call(*json.loads(line)) for line in log.read_text().splitlines()]
    return Ended(process.exitcode, raised.read_text(), calls)


def _call(fault: Fault, log: Path, raised: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    said = raised.open("w")
    try:
        _begin(fault, os.open(log, os.O_WRONLY))
        function(*args)
    except BaseException as error:
        said.write(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        said.flush()
        os._exit(1)
    os._exit(0)


def _begin(fault: Fault, log: int) -> None:
    """Inject the fault into this process, permanently."""
    count = 0

    def happens(call: Call, torn: Callable[[], Any] = int) -> None:
        nonlocal count
        if not any(Path(path).is_relative_to(fault.folder) for path in (call.path, call.target)):
            return
        count += 1
        os.write(log, f"{json.dumps(call)}\n".encode())
        if fault.mode == KILL and count == fault.at:
            torn()
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.mode == FAIL and count == fault.at:
            raise OSError(fault.error, os.strerror(fault.error))

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], (str, Path)):
            happens(Call("create" if args[2] & os.O_CREAT else "open", os.path.abspath(args[0])))
        elif event in ("os.mkdir", "os.remove", "os.rmdir"):
            path = os.path.join(_name(args[-1]), args[0])
            if os.path.lexists(path) == (event != "os.mkdir"):  # else the call fails anyway
                happens(Call(event, path))
        elif event == "os.rename":
            happens(Call(event, str(args[0]), str(args[1])))

    class Written(io.FileIO):
        def write(self, data: Any) -> int:
            happens(Call("write", str(self.name)), torn=lambda: super(Written, self).write(data[: len(data) // 2]))
            return super().write(data)

    def opened(file: Any, mode: str = "r", *args: Any, as_before: Callable[..., Any] = open, **kwargs: Any) -> Any:
        if "w" not in mode:
            return as_before(file, mode, *args, **kwargs)
        buffered = io.BufferedWriter(Written(file, "w"))
        return buffered if "b" in mode else io.TextIOWrapper(buffered)

    def synced(descriptor: int, sync: Callable[[int], None] = os.fsync) -> None:
        happens(Call("sync", _name(descriptor)))
        sync(descriptor)

    builtins.open = io.open = opened  # type: ignore[assignment]
    os.fsync = synced  # type: ignore[assignment]
    sys.addaudithook(audit)


def _name(descriptor: int) -> str:
    """Return the path of an open file or folder; an empty string for -1, which comes with complete paths."""
    return "" if descriptor < 0 else os.readlink(f"/proc/self/fd/{descriptor}")
