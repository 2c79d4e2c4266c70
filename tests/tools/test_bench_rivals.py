"""A schedule of torch that fails in the middle must neither hang the benchmark nor end it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn

from lightning_asyncpp.core.trace import Trace
from lightning_asyncpp.tools.bench.harness.job import Job
from lightning_asyncpp.tools.bench.harness.rank_processes import run_system
from lightning_asyncpp.tools.bench.names import FLOOR, ONE_F_ONE_B, ZBV
from lightning_asyncpp.tools.processes import free_port


class Breaking(nn.Module):
    """Breaks in its third forward, on one stage."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.left = 2 if breaks else 10**6

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left < 0:
            raise ArithmeticError("a layer broke")
        return x * self.weight


def run(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job = Job("sleep", 2, 4, (ONE_F_ONE_B, ZBV, FLOOR), 1, 2, 1)

    def breaking(meter: Trace, stage: int, chunks: int = 1, split_backward: bool = False) -> nn.Module:
        return Breaking(stage == 1)

    def sound(meter: Trace, stage: int, chunks: int = 1, split_backward: bool = False) -> nn.Module:
        return Breaking(False)

    outcomes = [run_system(job, system, breaking) for system in (ONE_F_ONE_B, ZBV)]
    after = run_system(job, ONE_F_ONE_B, sound)
    lines = [*(f"{result is None} {reason}" for result, reason in outcomes), f"{after[0] is None} {after[1]}"]
    Path(folder, str(rank)).write_text("\n".join(lines))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_failure_on_one_rank_is_known_on_all_and_the_next_system_runs(tmp_path: Path) -> None:
    multiprocessing.spawn(run, (free_port(), str(tmp_path)), nprocs=2)
    for rank in range(2):
        lines = (tmp_path / str(rank)).read_text().split("\n")
        # What one rank broke with, and not that the other lost its connection.
        assert lines == ["True ArithmeticError: a layer broke", "True ArithmeticError: a layer broke", "False "]
