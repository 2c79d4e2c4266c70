"""The processes of one host: ``python -m lightning_asyncpp.tools.bench.harness.rank_processes FOLDER HOST``.

It imports torch and Lightning once and forks the host's ranks, so that 32 of them start in seconds and share the
memory of what was imported. It ends when they end, with a non-zero exit code as soon as one fails, and they end with
it. A rank runs every system of the job in turn, again and again, and writes what it measured to ``rank-<rank>``; rank 0
also writes how far the benchmark is, a line at a time.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import signal
import statistics
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from lightning_asyncpp.tools.bench.harness.job import Job, RankRun
from lightning_asyncpp.tools.bench.harness.stage_layers import LayerFactory, layer_factory
from lightning_asyncpp.tools.bench.harness.systems import RUNNERS, RivalFailedError
from lightning_asyncpp.tools.bench.names import TITLES
from lightning_asyncpp.tools.processes import end_with_parent, rank_environment

JOB, PROGRESS, FAILED = "job", "progress", "failed"
"""Files of the benchmark's folder: what to run; lines that tell how far it is; the rank that failed, and its code."""

_ROUNDS = 10


def main(argv: list[str]) -> None:
    """Fork the ranks of the host, and wait for them."""
    folder, host = Path(argv[0]), int(argv[1])
    job: Job = pickle.loads((folder / JOB).read_bytes())
    per_host = job.stages // job.hosts
    children: dict[int, int] = {}
    # A rank's first collection of what it shares with the others would copy it, for a second, amid what is measured.
    gc.freeze()
    try:
        for rank in range(host * per_host, (host + 1) * per_host):
            if (process := os.fork()) == 0:
                _become(folder, rank, job)
            children[process] = rank
        _wait(folder, children)
    finally:
        for process in children:
            os.kill(process, signal.SIGKILL)


def _become(folder: Path, rank: int, job: Job) -> NoReturn:
    """Be a rank: with a log of its own, and nothing of the parent's clean-up."""
    code = 1
    end_with_parent()
    try:
        log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(rank_environment(rank, job.stages, job.stages // job.hosts))
        work(folder, job)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(folder: Path, children: dict[int, int]) -> None:
    """Until all ranks ended well.

    Raises:
        SystemExit: one did not.
    """
    while children:
        process, status = os.wait()
        rank, code = children.pop(process), os.waitstatus_to_exitcode(status)
        if code:
            (folder / FAILED).write_text(f"{rank} {code}")
            raise SystemExit(1)


def work(folder: Path, job: Job) -> None:
    """Run the job, and leave in ``folder`` what this rank measured."""
    rank = int(os.environ["RANK"])
    if job.pinned:
        _pin(rank)
    torch.set_num_threads(1)
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    _say(folder, f"{job.stages} processes are connected")
    make_layer, facts = layer_factory(job)
    facts |= measure_messages(job.hosts)
    runs, failures = _run_all(job, make_layer, folder)
    (folder / f"rank-{rank}").write_bytes(pickle.dumps((runs, facts, failures)))
    dist.barrier()
    dist.destroy_process_group()


def _run_all(job: Job, make_layer: LayerFactory, folder: Path) -> tuple[list[RankRun], dict[str, str]]:
    """All systems in turn, again and again: what else the machine does meets every one of them alike."""
    runs: list[RankRun] = []
    failures: dict[str, str] = {}
    for repeat in range(job.repeats):
        for system in job.order(repeat):
            if system in failures:
                continue
            started = time.monotonic()
            run, reason = run_system(job, system, make_layer)
            if run is None:
                failures[system] = reason
            else:
                runs.append(run)
            outcome = f"failed: {reason}" if run is None else f"took {time.monotonic() - started:.1f} s"
            _say(folder, f"repeat {repeat + 1} of {job.repeats}: {TITLES[system]} {outcome}")
    return [run for run in runs if run.system not in failures], failures


def run_system(job: Job, system: str, make_layer: LayerFactory) -> tuple[RankRun | None, str]:
    """Run one system once; a collective call.

    Returns:
        What was measured here; None, and the first failure of any rank, if one of torch's schedules failed.
    """
    dist.barrier()
    run, failure = None, None
    try:
        run = RUNNERS[system](job, system, make_layer)
    except RivalFailedError as error:
        failure = time.time(), str(error)
    failures: list[tuple[float, str] | None] = [None] * job.stages
    dist.all_gather_object(failures, failure)
    known = sorted(found for found in failures if found is not None)
    return (None, known[0][1]) if known else (run, "")


def _say(folder: Path, line: str) -> None:
    if dist.get_rank() == 0:
        with open(folder / PROGRESS, "a", encoding="utf-8") as file:
            file.write(f"{line}\n")


def _pin(rank: int) -> None:
    """Give this process one core, if the platform can; its threads inherit it."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


def measure_messages(hosts: int) -> dict[str, float]:
    """Milliseconds one way, the median of a few small messages there and back; a collective call.

    Returns:
        On rank 0: ``message_ms`` between two processes of a host, and ``link_message_ms`` between two hosts, where
        there are such.
    """
    processes = dist.get_world_size()
    peers = {"message_ms": 1} if processes > hosts else {}
    if hosts > 1:
        peers["link_message_ms"] = processes - 1
    return {name: _one_way(peer) for name, peer in peers.items()}


def _one_way(peer: int) -> float:
    """Milliseconds between ranks 0 and ``peer``; 0 on the other ranks."""
    dist.barrier()
    rank, token, times = dist.get_rank(), torch.zeros(1), []
    for _ in range(_ROUNDS if rank in (0, peer) else 0):
        start = time.perf_counter()
        for sender in (0, peer):
            if rank == sender:
                dist.send(token, peer - rank)
            else:
                dist.recv(token, peer - rank)
        times.append((time.perf_counter() - start) / 2 * 1e3)
    return statistics.median(times) if times else 0.0


if __name__ == "__main__":
    main(sys.argv[1:])
