"""Programs run in processes of the tests' fork server, so that they need not import the package again."""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from tests.helpers.pool import worker_context


class Ended(NamedTuple):
    """Result of a program: its exit code (after a signal, the negative signal number) and its output."""

    returncode: int
    stdout: str
    stderr: str


def run(arguments: Sequence[str], folder: Path, seconds: float = 100, **environment: str) -> Ended:
    """Run ``python ARGUMENTS`` in a folder: a script, ``-m MODULE`` or ``-c CODE``, each with its arguments.

    When it ends, or after ``seconds``, its whole process group is killed.
    """
    (ended,) = run_ranks(arguments, folder, [environment], seconds)
    return ended


def run_ranks(
    arguments: Sequence[str], folder: Path, environments: Sequence[Mapping[str, str]], seconds: float = 100
) -> list[Ended]:
    """Run a program, as :func:`run` does, in several processes at once that differ in their environment."""
    outputs = [(folder / f"{rank}.out", folder / f"{rank}.err") for rank in range(len(environments))]
    processes = [
        start(arguments, folder, *said, environment) for said, environment in zip(outputs, environments, strict=True)
    ]
    for process in processes:
        process.join(seconds)
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
    texts = [[path.read_text(encoding="utf-8") for path in said] for said in outputs]
    return [Ended(process.exitcode, *said) for process, said in zip(processes, texts, strict=True)]


def start(
    arguments: Sequence[str], folder: Path, output: Path, errors: Path, environment: Mapping[str, str]
) -> Any:  # fmt: skip
    """Start such a program as a ``multiprocessing.Process`` that leads its own process group."""
    process = worker_context().Process(
        target=_be, args=(list(arguments), str(folder), str(output), str(errors), dict(environment))
    )
    process.start()
    return process


def _be(arguments: list[str], folder: str, output: str, errors: str, environment: dict[str, str]) -> None:
    """Run the program in this process, and end the process."""
    os.setsid()
    speak_into(output, errors)
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(1)
    try:
        _execute(arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    end_process(code)


def _execute(arguments: list[str]) -> None:
    how = arguments.pop(0) if arguments[0] in ("-m", "-c") else ""
    program, *more = arguments
    sys.argv = ["-c" if how == "-c" else program, *more]
    sys.path.insert(0, os.getcwd() if how else os.path.dirname(os.path.abspath(program)))
    if how == "-c":
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), vars(main))
    elif how == "-m":
        sys.modules.pop(program, None)  # pytest may have imported it
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program, run_name="__main__")


def end_process(code: int) -> None:
    """End the process as Python does: join threads, call exit handlers and flush the output."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def speak_into(output: str, errors: str) -> None:
    """Let this process write its output and its errors to files."""
    for path, descriptor in ((output, 1), (errors, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def allocated(function, path):
    """Return the peak and the final number of bytes that ``function`` allocates, from the allocator's events.

    Earlier memory that is freed during the call, such as garbage of other tests, does not count.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    profiler.export_chrome_trace(str(path))
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    peak, sizes = 0, {}  # sizes by address
    for event in sorted(events, key=lambda e: e["ts"]):
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        if size > 0:
            sizes[address] = size
        else:
            sizes.pop(address, None)
        peak = max(peak, sum(sizes.values()))
    return peak, sum(sizes.values())
