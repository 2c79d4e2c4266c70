"""The ranks of small trainings: starts them, waits for them, and says of those that fail or hang where they were.

``python -m lightning_asyncpp.tools.doctor.case_ranks JOB`` is one of them.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_asyncpp.core.ranks.interfaces import LOOPBACK
from lightning_asyncpp.tools.doctor.cases import CASES, Place, fit
from lightning_asyncpp.tools.doctor.task import Task
from lightning_asyncpp.tools.processes import Children, end_of, free_port, last_error, rank_environment, traced

_RANK = "lightning_asyncpp.tools.doctor.case_ranks"
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


def launch(task: Task, place: Place, cases: Sequence[str], name: str, limit: float) -> Ran:
    """Run cases in new processes; those that hang are killed.

    Args:
        task: whose time it takes.
        place: where.
        cases: names.
        name: of a folder for it.
        limit: seconds.

    Raises:
        NoTimeLeftError: the part has too little time left to begin.
    """
    seconds, is_cut = task.seconds_for(limit, _LEAST_SECONDS)
    folder = task.path / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    job = {"folder": str(folder), "place": asdict(place), "cases": list(cases)}
    port, failed, ran_out = free_port(), None, False
    with Children(folder) as children:
        for rank in range(place.ranks):
            command = traced(seconds - 2, _RANK, json.dumps(job))
            children.start(f"rank-{rank}", command, environment_of(place, rank, port))
        try:
            failed = children.wait(seconds)
            error = "" if failed is None else f"{failed} failed: {last_error(children.log(failed))}"
        except TimeoutError as late:
            error, ran_out = str(late), is_cut
        names = sorted((f"rank-{rank}" for rank in range(place.ranks)), key=lambda rank: rank != failed)
        logs = [children.log(rank) for rank in names]  # that of the one that failed first
    if error:
        for log in logs:
            print(f"---- {name}, {log.stem}\n{end_of(log, _LOG_CHARACTERS)}", flush=True)
    outcomes = {case: folder / f"{case}.pt" for case in cases}
    return Ran({case: torch.load(path) for case, path in outcomes.items() if path.exists()}, error, ran_out)


def environment_of(place: Place, rank: int, port: int) -> Mapping[str, str]:
    """The variables that tell a process which rank it is."""
    variables = rank_environment(rank, place.ranks, place.devices)
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if not place.is_gpu:
        variables |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if place.route == "nccl on one GPU":
        variables |= {name: value for name, value in _SEVERAL_PER_GPU.items() if not os.environ.get(name)}
    return variables


def work(job: dict[str, Any]) -> None:
    """Train the cases of a job one after the other; rank 0 writes what came of each to a file.

    Args:
        job: ``folder``, ``place`` (arguments of :class:`Place`) and ``cases``.
    """
    folder, place = Path(job["folder"]), Place(**job["place"])
    torch.set_num_threads(1)
    for name in job["cases"]:
        print(f"rank {os.environ['RANK']}: {name}", flush=True)
        outcome = fit(CASES[name], place, folder)
        if os.environ["RANK"] == "0":
            path = folder / f"{name}.pt"
            torch.save(outcome, path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)


if __name__ == "__main__":
    work(json.loads(sys.argv[1]))
