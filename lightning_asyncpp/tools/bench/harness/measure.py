"""Starts the processes of a benchmark, waits for them, and reads what they measured."""

from __future__ import annotations

import pickle
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lightning_asyncpp.tools.bench.harness.hosts import Hosts, open_hosts, wait_for
from lightning_asyncpp.tools.bench.harness.job import Job, RankRun
from lightning_asyncpp.tools.bench.harness.rank_processes import FAILED, JOB, PROGRESS
from lightning_asyncpp.tools.processes import Children, end_of, free_port, sigterm_raises

_STARTER = "lightning_asyncpp.tools.bench.harness.rank_processes"
_SMALLEST_TIMEOUT = 1800.0


@dataclass
class Measured:
    """What all processes measured.

    Attributes:
        runs: system -> repeats -> ranks.
        facts: what was found out before the first run, such as the calibrated size and the link's delay.
        failures: system -> why it could not be run.
    """

    runs: dict[str, list[list[RankRun]]]
    facts: dict[str, float]
    failures: dict[str, str] = field(default_factory=dict)


def measure(job: Job, timeout: float | None = None) -> Measured:
    """Run a job in ``job.stages`` new processes; how far it is goes to standard error.

    Args:
        job: what to run.
        timeout: seconds after which all processes are killed; default: three times what they should take at most, and
            at least half an hour.

    Raises:
        BenchmarkFailedError: with the end of what the first failed process printed.
    """
    if timeout is None:
        timeout = max(_SMALLEST_TIMEOUT, 3 * longest_seconds(job))
    with tempfile.TemporaryDirectory(prefix="asyncpp-bench-") as name, sigterm_raises():
        folder = Path(name)
        (folder / JOB).write_bytes(pickle.dumps(job))
        with open_hosts(job.hosts, job.link_latency_ms, job.link_mbit, folder) as hosts, Children(folder) as children:
            _start(children, folder, hosts)
            wait_for(children, timeout, lambda failed: _reason(folder, children, failed), Tail(folder / PROGRESS).show)
        measured = _collect(job, [pickle.loads((folder / f"rank-{r}").read_bytes()) for r in range(job.stages)])
        measured.facts |= hosts.facts
        return measured


def longest_seconds(job: Job) -> float:
    """How long all systems take if none of them overlaps more than GPipe does, about."""
    per_batch = job.busy_seconds * (1 + (job.stages - 1) / job.micro_batches)
    latencies = 2 * (job.stages + job.micro_batches) * job.link_latency_ms / 1e3
    return len(job.systems) * job.repeats * job.total_batches * (per_batch + latencies)


@dataclass
class Tail:
    """Shows on standard error what is appended to a file.

    Attributes:
        path: of the file; it need not exist yet.
    """

    path: Path
    _started: float = field(default_factory=time.monotonic)
    _shown: int = 0

    def show(self) -> None:
        """Print the lines that are new."""
        with suppress(OSError):
            lines = self.path.read_text().split("\n")[:-1]
            for line in lines[self._shown :]:
                print(f"[{time.monotonic() - self._started:6.1f} s] {line}", file=sys.stderr, flush=True)
            self._shown = len(lines)


def _start(children: Children, folder: Path, hosts: Hosts) -> None:
    port = free_port()
    environment = {
        **hosts.environment,
        "MASTER_ADDR": hosts.addresses[0],
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    for host, prefix in enumerate(hosts.prefixes):
        command = [*prefix, sys.executable, "-m", _STARTER, str(folder), str(host)]
        children.start(f"host-{host}", command, environment)


def _reason(folder: Path, children: Children, failed: str) -> str:
    """The end of the log of the rank that failed first, or of the starter, if that did."""
    note = folder / FAILED
    if not note.exists():
        return f"the starter of {failed} failed:\n{end_of(children.log(failed))}"
    rank, code = note.read_text().split()
    return f"process {rank} exited with code {code}:\n{end_of(folder / f'rank-{rank}.log')}"


def _collect(job: Job, ranks: list[tuple[list[RankRun], dict[str, float], dict[str, str]]]) -> Measured:
    _, facts, failures = ranks[0]
    runs: dict[str, list[list[RankRun]]] = {system: [] for system in job.systems if system not in failures}
    for of_ranks in zip(*(of_rank for of_rank, _, _ in ranks), strict=True):
        runs[of_ranks[0].system].append(sorted(of_ranks, key=lambda run: run.stage))
    return Measured(runs, facts, failures)
