"""torch's own pipeline schedules, through their public names, each run once on this process's stage or chunks.

Interleaved schedules put two chunks of half the work on each process, so that the work per process is that of the
others. In ZBV the chunks run in a V, so that the loss is computed where the batches enter. torch pads nothing: an
interleaved schedule refuses a number of micro-batches that its rounds do not divide. ZBV has no bubble where a
forward, the gradient of the input and that of the weight take equally long (the default), and with at least 2 P
micro-batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn import functional as F

from lightning_asyncpp.pipeline.trace import Trace
from lightning_asyncpp.tools.bench.job import Job, RankRun
from lightning_asyncpp.tools.bench.names import (
    GPIPE,
    INTERLEAVED,
    INTERLEAVED_ZERO_BUBBLE,
    ONE_F_ONE_B,
    SPLIT_BACKWARD,
    ZBV,
)
from lightning_asyncpp.tools.bench.work import LayerFactory, make_optimizer

_CHUNKS = 2
_SINGLE: dict[str, Callable[..., Any]] = {ONE_F_ONE_B: Schedule1F1B, GPIPE: ScheduleGPipe}
_MULTI: dict[str, Callable[..., Any]] = {
    INTERLEAVED: ScheduleInterleaved1F1B,
    INTERLEAVED_ZERO_BUBBLE: ScheduleInterleavedZeroBubble,
    ZBV: ScheduleZBVZeroBubble,
}


class RivalFailedError(RuntimeError):
    """One of torch's schedules failed; it names the reason."""


def run_rival(job: Job, system: str, make_layer: LayerFactory) -> RankRun:
    """Run one of torch's schedules in a plain loop.

    It has a process group of its own: where a process fails, the others hear of it, and of nothing else.

    Raises:
        RivalFailedError: with the first line of the first cause.
    """
    group = dist.new_group(timeout=timedelta(seconds=60 + 4 * job.busy_seconds))
    try:
        return _run(job, system, make_layer, group)
    except Exception as error:
        raise RivalFailedError(_first_cause(error)) from error
    finally:
        dist.destroy_process_group(group)


def _first_cause(error: BaseException) -> str:
    """What began it, in a line: torch's schedules wrap what a stage raises."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def _run(job: Job, system: str, make_layer: LayerFactory, group: Any) -> RankRun:
    meter = Trace(-1)
    rank = dist.get_rank()
    indices = stage_indices(system, rank, job.stages)
    count = job.stages * len(indices)
    layers = [make_layer(meter, rank, len(indices), system in SPLIT_BACKWARD) for _ in indices]
    stages = [_stage(layer, index, count, job, group) for layer, index in zip(layers, indices)]
    if system in _SINGLE:
        schedule = _SINGLE[system](stages[0], job.micro_batches, loss_fn=F.mse_loss)
    else:
        schedule = _MULTI[system](stages, job.micro_batches, loss_fn=F.mse_loss)
    optimizer = make_optimizer(torch.nn.ModuleList(layers))
    marks = _loop(schedule, job.batches(), optimizer, 0 in indices, count - 1 in indices)
    return RankRun(system, rank, meter.spans, marks, [])


def stage_indices(system: str, rank: int, num_ranks: int) -> tuple[int, ...]:
    """Which of the schedule's stages a process has: one, or two chunks in a loop or in a V."""
    if system in _SINGLE:
        return (rank,)
    last = _CHUNKS * num_ranks - 1
    return (rank, last - rank) if system == ZBV else (rank, num_ranks + rank)


def _stage(layer: torch.nn.Module, index: int, count: int, job: Job, group: Any) -> PipelineStage:
    # Shapes are given, or torch would run every layer once to find them out.
    example = torch.empty(job.rows, job.width)
    inputs = example.clone().requires_grad_(index > 0)
    outputs = example.clone().requires_grad_()
    return PipelineStage(layer, index, count, torch.device("cpu"), (inputs,), (outputs,), group=group)


def _loop(
    schedule: Any, batches: Sequence[tuple[Tensor, Tensor]], optimizer: torch.optim.Optimizer, first: bool, last: bool
) -> list[float]:
    """Train; returns when each mini-batch ended."""
    marks = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        arguments = (inputs,) if first else ()
        loss: dict[str, Any] = {"target": targets, "losses": []} if last else {}
        schedule.step(*arguments, return_outputs=False, **loss)
        optimizer.step()
        marks.append(time.perf_counter())
    return marks
