"""One process of a benchmark: ``python -m lightning_asyncpp.tools.bench.worker JOB RESULTS``.

It expects the variables that torchrun sets (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), runs every system
of the job in turn, and writes what it measured to ``RESULTS/rank-<rank>.json``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from lightning_asyncpp.pipeline.trace import Trace
from lightning_asyncpp.tools.bench.job import Job, RankRun
from lightning_asyncpp.tools.bench.layers import ComputingLayer, SleepingLayer, block_seconds
from lightning_asyncpp.tools.bench.systems import RUNNERS


def main(argv: list[str]) -> None:
    """Run the job."""
    job, results = Job.load(Path(argv[0])), Path(argv[1])
    rank = int(os.environ["RANK"])
    if job.pinned:
        _pin(rank)
    torch.set_num_threads(1)
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    make_layer, facts = _layer_factory(job)
    runs = [run.to_json() for run in _run_all(job, make_layer)]
    (results / f"rank-{rank}.json").write_text(json.dumps({"runs": runs, "facts": facts}))
    dist.barrier()
    dist.destroy_process_group()


def _run_all(job: Job, make_layer: Callable[[Trace], nn.Module]) -> list[RankRun]:
    """All systems in turn, again and again: what else the machine does meets every one of them alike."""
    runs = []
    for _ in range(job.repeats):
        for system in job.systems:
            dist.barrier()
            runs.append(RUNNERS[system](job, system, make_layer))
    return runs


def _layer_factory(job: Job) -> tuple[Callable[[Trace], nn.Module], dict[str, float]]:
    if job.work == "sleep":
        return lambda meter: SleepingLayer(job.forward_ms, job.backward_ms, job.width, meter), {}
    dist.barrier()  # all processes calibrate at once, as they compute at once later
    seconds = torch.tensor(block_seconds(job.rows, job.width), dtype=torch.float64)
    dist.all_reduce(seconds)
    per_block = float(seconds) / job.stages
    blocks = max(1, round(job.target_ms / 1e3 / per_block))
    facts = {"blocks": float(blocks), "calibrated_ms": blocks * per_block * 1e3}
    return lambda meter: ComputingLayer(blocks, job.width, meter), facts


def _pin(rank: int) -> None:
    """Give this process one core, if the platform can; its threads inherit it."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


if __name__ == "__main__":
    main(sys.argv[1:])
