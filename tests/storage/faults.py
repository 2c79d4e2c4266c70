"""System calls that fail, or end the process, one after the other; in processes of their own."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.helpers.pool import worker_context

COUNT, FAIL, KILL = range(3)
NO_SPACE, BROKEN = errno.ENOSPC, errno.EIO


class Fault(NamedTuple):
    """What happens to the system calls of a process below ``folder``.

    Attributes:
        mode: ``COUNT`` lets them be; ``FAIL`` or ``KILL`` at the call of number ``at``, the first is 1.
        error: what it fails with.
        exchange: whether the file system can exchange two names at once.
    """

    library: str
    folder: str
    mode: int = COUNT
    at: int = 0
    error: int = NO_SPACE
    exchange: bool = True


class Call(NamedTuple):
    """A system call that was made: what it does, an error or 0, and where."""

    what: str
    error: int
    path: str
    target: str


class Ended(NamedTuple):
    """How a process ended: 0 if the function returned, 1 if it raised, ``-SIGKILL``; what it raised; its calls."""

    code: int | None
    raised: str
    calls: list[Call]


def why_not() -> str:
    """Why faults cannot be injected here; nothing if they can."""
    if sys.platform != "linux":
        return "system calls are trapped by Linux's seccomp"
    return "" if shutil.which("cc") else "there is no C compiler (cc), which builds what traps system calls"


def build(folder: Path) -> str:
    """Compile the library."""
    library = folder / "faults.so"
    source = Path(__file__).with_name("faults.c")
    command = ["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    return str(library)


def begin(fault: Fault, log: int) -> None:
    """Begin in this process, for good."""
    library = ctypes.CDLL(fault.library)
    how = fault.mode, fault.at, fault.error, log, int(not fault.exchange)
    if wrong := library.faults_begin(os.fsencode(fault.folder), *how):
        raise OSError(wrong, f"seccomp: {os.strerror(wrong)}")


def run(fault: Fault, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> Ended:
    """Call a function in a process of its own, in which a system call fails or ends it."""
    context = worker_context()
    log = Path(fault.library).with_name("calls")
    said = log.with_name("raised")
    log.write_bytes(b"")
    said.write_bytes(b"")
    process = context.Process(target=_call, args=(fault, str(log), str(said), function, args), daemon=True)
    process.start()
    process.join(timeout)
    if process.is_alive():
        process.kill()
        raise TimeoutError(f"{function.__name__} did not end within {timeout} s under {fault}")
    calls = [line.split("\t") for line in log.read_text().splitlines()]
    return Ended(process.exitcode, said.read_text(), [Call(c[0], int(c[1]), c[2], c[3]) for c in calls])


def _call(fault: Fault, log: str, said: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    raised = open(said, "w")  # noqa: SIM115  (to the end of the process)
    try:
        begin(fault, os.open(log, os.O_WRONLY))
        function(*args)
    except BaseException as error:
        raised.write(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        raised.flush()
        os._exit(1)
    os._exit(0)
