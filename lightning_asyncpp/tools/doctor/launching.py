"""Starts the ranks of small trainings, waits for them, and says of those that failed or hang where they were."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lightning_asyncpp.pipeline.ranks.interfaces import LOOPBACK
from lightning_asyncpp.tools.bench.launch import free_port
from lightning_asyncpp.tools.bench.processes import BenchmarkFailedError, Children, end_of
from lightning_asyncpp.tools.doctor.cases import Place
from lightning_asyncpp.tools.doctor.running import last_error
from lightning_asyncpp.tools.doctor.task import Task

_RANK = "lightning_asyncpp.tools.doctor.rank"
_LOG_CHARACTERS = 6000

SEVERAL_PER_GPU_SINCE = (2, 30)
"""NCCL's version that takes several ranks on one GPU."""
_SEVERAL_PER_GPU = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "4",  # their kernels must fit the GPU together
    # Each is a machine of its own to the strategy, which leaves loopback alone then.
    "GLOO_SOCKET_IFNAME": LOOPBACK,
    "NCCL_SOCKET_IFNAME": f"={LOOPBACK}",
}
"""What they need, where the user has not set it."""

_LEAST_SECONDS = 30
"""Ranks take a while to start."""


@dataclass(frozen=True)
class Ran:
    """What became of a job.

    Attributes:
        outcomes: case -> what :func:`.cases.fit` returned, of those that came to their end.
        error: why the others did not; empty if all did.
        ran_out: whether it was the part's time that was over, and not their own.
    """

    outcomes: dict[str, dict[str, Any]]
    error: str
    ran_out: bool = False


def launch(task: Task, place: Place, cases: Sequence[str], name: str, limit: float, together: int = 1) -> Ran:
    """Run cases in new processes; those that hang are killed.

    Args:
        task: whose time it takes.
        place: where.
        cases: names.
        name: of a folder for it.
        limit: seconds.
        together: replicas whose batches a single process trains.

    Raises:
        NoTimeLeftError: the part has too little time left to begin.
    """
    seconds, is_cut = task.seconds_for(limit, _LEAST_SECONDS)
    folder = task.path / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    job = {"folder": str(folder), "place": asdict(place), "cases": list(cases), "together": together}
    job["ends"] = time.time() + seconds
    port, failed, ran_out = free_port(), None, False
    with Children(folder) as children:
        for rank in range(place.ranks):
            command = [sys.executable, "-m", _RANK, json.dumps(job)]
            children.start(f"rank-{rank}", command, environment_of(place, rank, port))
        try:
            failed = children.wait(time.monotonic() + seconds)
            error = "" if failed is None else f"{failed} failed: {last_error(children.log(failed))}"
        except BenchmarkFailedError:
            error, ran_out = f"no end within {seconds:.0f} s", is_cut
        names = sorted((f"rank-{rank}" for rank in range(place.ranks)), key=lambda rank: rank != failed)
        logs = [children.log(rank) for rank in names]  # that of the one that failed first
    if error:
        for log in logs:
            print(f"---- {name}, {log.stem}\n{end_of(log, _LOG_CHARACTERS)}", flush=True)
    outcomes = {case: folder / f"{case}.pt" for case in cases}
    return Ran({case: torch.load(path) for case, path in outcomes.items() if path.exists()}, error, ran_out)


def environment_of(place: Place, rank: int, port: int) -> Mapping[str, str]:
    """The variables that tell a process which rank it is."""
    node, local_rank = divmod(rank, place.devices)
    variables: dict[str, object] = {
        "RANK": rank, "LOCAL_RANK": local_rank, "NODE_RANK": node, "GROUP_RANK": node,
        "WORLD_SIZE": place.ranks, "LOCAL_WORLD_SIZE": place.devices, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip
    if not place.is_gpu:
        variables |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": 1}
    if place.route == "nccl on one GPU":
        variables |= {name: value for name, value in _SEVERAL_PER_GPU.items() if not os.environ.get(name)}
    return {name: str(value) for name, value in variables.items()}
