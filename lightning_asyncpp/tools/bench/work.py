"""What the stages of a benchmark do: how each system gets its layers, and the optimizer of all of them."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from lightning_asyncpp.pipeline.trace import Trace
from lightning_asyncpp.tools.bench.computing import ComputingLayer, block_seconds
from lightning_asyncpp.tools.bench.job import Job
from lightning_asyncpp.tools.bench.sleeping import SleepingLayer, Sleeps

LEARNING_RATE = 0.01


class LayerFactory(Protocol):
    """Makes a stage, or one of the equal chunks that it is cut into."""

    def __call__(self, meter: Trace, stage: int, chunks: int = 1, split_backward: bool = False) -> nn.Module:
        """Make it.

        Args:
            meter: records its forwards and backwards.
            stage: which one, 0 first; chunks name the stage that they are a part of.
            chunks: how many the stage is cut into.
            split_backward: whether the gradients of inputs and of weights run apart.
        """


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """Plain SGD."""
    return torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)


def layer_factory(job: Job) -> tuple[LayerFactory, dict[str, float]]:
    """What makes the job's layers, and what was found out on the way; a collective call."""
    return (_Sleeping(job), {}) if job.work == "sleep" else _calibrated(job)


class _Sleeping:
    def __init__(self, job: Job) -> None:
        self.job = job

    def __call__(self, meter: Trace, stage: int, chunks: int = 1, split_backward: bool = False) -> nn.Module:
        job, share = self.job, self.job.weight_share if split_backward else 0.0
        sleeps = Sleeps(job.forward_ms / chunks, job.backward_ms / chunks, share, stage, job.jitter, job.seed)
        return SleepingLayer(sleeps, job.width, meter)


class _Computing:
    def __init__(self, blocks: int, width: int) -> None:
        self.blocks, self.width = blocks, width

    def __call__(self, meter: Trace, stage: int, chunks: int = 1, split_backward: bool = False) -> nn.Module:
        return ComputingLayer(self.blocks // chunks, self.width, meter)


def _calibrated(job: Job) -> tuple[LayerFactory, dict[str, float]]:
    dist.barrier()  # all processes calibrate at once, as they compute at once later
    seconds = torch.tensor(block_seconds(job.rows, job.width), dtype=torch.float64)
    dist.all_reduce(seconds)
    per_block = float(seconds) / job.stages
    blocks = 2 * max(1, round(job.target_ms / 2e3 / per_block))  # even: interleaved schedules get half of them twice
    return _Computing(blocks, job.width), {"blocks": float(blocks), "calibrated_ms": blocks * per_block * 1e3}
