"""Starts the processes of a benchmark, waits for them, and reads what they measured."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_asyncpp.tools.bench.job import Job, RankRun


class BenchmarkFailedError(RuntimeError):
    """A process of the benchmark failed, or all of them together took too long."""


@dataclass
class Measured:
    """What all processes measured.

    Attributes:
        runs: system -> repeats -> ranks.
        facts: what a process found out before it started, such as the calibrated size.
    """

    runs: dict[str, list[list[RankRun]]]
    facts: dict[str, float]


def measure(job: Job, timeout: float) -> Measured:
    """Run a job in ``job.stages`` new processes.

    Args:
        job: what to run.
        timeout: seconds after which all processes are killed.

    Raises:
        BenchmarkFailedError: with the end of what the first failed process printed.
    """
    with tempfile.TemporaryDirectory(prefix="asyncpp-bench-") as name:
        folder = Path(name)
        job.save(folder / "job.json")
        port = _free_port()
        processes = [_start(folder, rank, job.stages, port) for rank in range(job.stages)]
        try:
            _wait(processes, folder, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return _collect(job, [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(job.stages)])


def _start(folder: Path, rank: int, world_size: int, port: int) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "lightning_asyncpp.tools.bench.worker", str(folder / "job.json"), str(folder)]
    with open(folder / f"rank-{rank}.log", "wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, deadline: float) -> None:
    while True:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            log = (folder / f"rank-{failed[0]}.log").read_text(errors="replace")
            raise BenchmarkFailedError(f"process {failed[0]} exited with code {codes[failed[0]]}:\n{log[-4000:]}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            raise BenchmarkFailedError("the benchmark took longer than --timeout: raise it, or run fewer mini-batches")
        time.sleep(0.2)


def _collect(job: Job, ranks: list[dict[str, Any]]) -> Measured:
    runs: dict[str, list[list[RankRun]]] = {system: [] for system in job.systems}
    for number in range(job.repeats * len(job.systems)):
        of_ranks = [RankRun.from_json(rank["runs"][number]) for rank in ranks]
        runs[of_ranks[0].system].append(sorted(of_ranks, key=lambda run: run.stage))
    return Measured(runs, ranks[0]["facts"])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
