"""One process of a benchmark: runs every system of the job in turn, again and again.

It expects the variables that torchrun sets (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and writes what it
measured to ``rank-<rank>.json``; rank 0 also writes how far the benchmark is, a line at a time.
"""

from __future__ import annotations

import json
import logging
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_asyncpp.tools.bench.job import Job, RankRun
from lightning_asyncpp.tools.bench.names import TITLES
from lightning_asyncpp.tools.bench.ping import measure_messages
from lightning_asyncpp.tools.bench.rivals import RivalFailedError
from lightning_asyncpp.tools.bench.systems import RUNNERS
from lightning_asyncpp.tools.bench.work import LayerFactory, layer_factory

JOB, PROGRESS = "job.json", "progress"


def work(folder: Path) -> None:
    """Run the job of ``folder``."""
    job = Job.load(folder / JOB)
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
    result: dict[str, Any] = {"runs": [run.to_json() for run in runs], "facts": facts, "failures": failures}
    (folder / f"rank-{rank}.json").write_text(json.dumps(result))
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
