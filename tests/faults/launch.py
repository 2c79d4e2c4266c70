"""Launcher of a job's ranks, which waits until all have ended and checks that no processes are left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults import script
from tests.faults.jobs import Job
from tests.faults.places import Fault
from tests.helpers.pool import elastic_environment, free_port, worker_context


@dataclass(frozen=True)
class Host:
    """Host of a rank: the file of its network namespace, if any, and additional environment variables."""

    namespace: str = ""
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """Outcome of a job's processes.

    Attributes:
        folder: folder with the ranks' files.
        codes: exit codes by rank; a process that a signal ended has the negative signal number.
        seconds: time from the fault, or from the start without a fault, until the last process ended.
    """

    folder: Path
    codes: list[int]
    seconds: float

    def output(self, rank: int) -> str:
        return (self.folder / f"{rank}.output").read_text()

    def outputs(self) -> str:
        """Return the exit codes and outputs of all ranks."""
        texts = [f"---- rank {r}, exit code {code}:\n{self.output(r)}" for r, code in enumerate(self.codes)]
        return "\n".join(texts)

    def happened(self, rank: int) -> bool:
        return (self.folder / f"{rank}.happened").exists()

    def reached(self, rank: int) -> int | None:
        """Return the number of steps whose end a rank has seen; ``None`` if it had not begun to train."""
        file = self.folder / f"{rank}.reached"
        return int(file.read_text()) if file.exists() else None

    def results(self) -> list[dict[str, Any]]:
        """Return the results of all ranks, which must have ended without an error."""
        assert self.codes == [0] * len(self.codes), self.outputs()
        return [script.result_of(self.folder, rank) for rank in range(len(self.codes))]


def launch(
    job: Job, folder: Path, checkpoints: Path, fault: Fault | None = None, *, limit: float,
    hosts: Sequence[Host] = (), is_counted: bool = False,
) -> Ended:  # fmt: skip
    """Run a job until all its ranks have ended.

    Args:
        job: job to run.
        folder: folder for the ranks' files; the folder ``data`` is next to it.
        checkpoints: folder for checkpoints.
        fault: fault to inject, if any.
        limit: seconds after the fault, or after the start without one, within which all ranks have to end.
        hosts: hosts of the ranks; by default all run on this machine.
        is_counted: whether the results contain the numbers of calls of the package.
    """
    folder.mkdir(parents=True)
    context, port = worker_context(), free_port()
    processes = []
    for rank in range(job.processes):
        host = hosts[rank] if hosts else Host()
        environment = elastic_environment(rank, job.processes, port) | host.variables
        args = (rank, job, folder, checkpoints, fault, environment, host.namespace, is_counted)
        processes.append(context.Process(target=script.run, args=args))
    with _ended_at_last(processes):
        for process in processes:
            process.start()
        begin = _wait(processes, folder, fault, limit)
        seconds = time.monotonic() - begin
        _check_nothing_is_left([process.pid for process in processes])
    return Ended(folder, [int(process.exitcode or 0) for process in processes], seconds)


@contextmanager
def _ended_at_last(processes: list[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join(10)


def _wait(processes: list[Any], folder: Path, fault: Fault | None, limit: float) -> float:
    """Wait until all processes have ended, and return the time at which the limit began."""
    begin, seen = time.monotonic(), fault is None
    while alive := [rank for rank, process in enumerate(processes) if process.exitcode is None]:
        if not seen and fault is not None and (folder / f"{fault.rank}.happened").exists():
            begin, seen = time.monotonic(), True
        if fault is not None and fault.what == "stop" and alive == [fault.rank]:
            processes[fault.rank].kill()  # as the user who stopped it would do
        if time.monotonic() - begin > limit:
            raise AssertionError(_where(processes, alive, folder, limit))
        time.sleep(0.02)
    return begin


def _where(processes: list[Any], alive: list[int], folder: Path, limit: float) -> str:
    for rank in alive:
        os.kill(processes[rank].pid, script.WHERE_SIGNAL)
    time.sleep(1)
    said = Ended(folder, [processes[rank].exitcode for rank in range(len(processes))], limit).outputs()
    return f"ranks {alive} did not end within {limit:g} s:\n{said}"


def _check_nothing_is_left(sessions: list[int], patience: float = 15.0) -> None:
    """Check that no processes of the ranks are left; DataLoader workers look for their parent every five seconds."""
    deadline = time.monotonic() + patience
    while left := [pid for pid, session in _alive() if session in sessions]:
        if time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"{len(left)} processes outlived their ranks")
        time.sleep(0.05)


def _alive() -> Iterator[tuple[int, int]]:
    """Yield the process and session ids of all processes on this machine except zombies."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if state[0] != "Z":
                yield int(entry.name), int(state[3])
