"""The systems that a benchmark compares, each run once on this process's stage or chunks.

torch's own pipeline schedules go by their public names. Interleaved ones put two chunks of half the work on each
process, so that the work per process is that of the others. In ZBV the chunks run in a V, so that the loss is computed
where the batches enter. torch pads nothing: an interleaved schedule refuses a number of micro-batches that its rounds
do not divide. ZBV has no bubble where a forward, the gradient of the input and that of the weight take equally long
(the default), and with at least 2 P micro-batches.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_asyncpp.core.trace import Trace
from lightning_asyncpp.fabric import AsyncPipelineStrategy as FabricAsyncStrategy
from lightning_asyncpp.tools.bench.harness.job import Job, RankRun
from lightning_asyncpp.tools.bench.harness.stage_layers import LayerFactory, make_optimizer
from lightning_asyncpp.tools.bench.names import (
    ASYNC,
    ASYNC_FABRIC,
    ASYNC_MONITORED,
    ASYNC_TRACED,
    FLOOR,
    GPIPE,
    INTERLEAVED,
    INTERLEAVED_ZERO_BUBBLE,
    ONE_F_ONE_B,
    RIVALS,
    SPLIT_BACKWARD,
    STALENESS,
    SYNC,
    ZBV,
)
from lightning_asyncpp.trainer import AsyncPipelineStrategy, PipelineMonitor, PipelineTrace, SyncPipelineStrategy

_MAX_NORM = 1e-3  # so small that gradients are always scaled
_CHUNKS = 2
_SINGLE: dict[str, Callable[..., Any]] = {ONE_F_ONE_B: Schedule1F1B, GPIPE: ScheduleGPipe}
_MULTI: dict[str, Callable[..., Any]] = {
    INTERLEAVED: ScheduleInterleaved1F1B,
    INTERLEAVED_ZERO_BUBBLE: ScheduleInterleavedZeroBubble,
    ZBV: ScheduleZBVZeroBubble,
}


class BenchModule(L.LightningModule):
    """One layer per stage, mean squared error, SGD; the loss is logged, as users do."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.model = nn.Sequential(*layers)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of a micro-batch."""
        inputs, targets = batch
        loss = F.mse_loss(self.model(inputs), targets)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer that all systems use."""
        return make_optimizer(self)


class _Marks(L.Callback):
    """Notes when each training batch ends, and lets the engine record its timeline."""

    def __init__(self, traced: bool) -> None:
        self.times: list[float] = []
        self.trace: Trace | None = None
        self.traced = traced
        self.stage = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the engine."""
        session = trainer.strategy.session  # type: ignore[attr-defined]
        self.stage = session.mesh.stage
        if self.traced:
            self.trace = session.engine.runner.trace = Trace(self.stage)

    def on_train_batch_end(self, *_: Any) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())


def run_trainer(job: Job, system: str, make_layer: LayerFactory) -> RankRun:
    """Run one of our strategies as users do: an ordinary Trainer that loads, logs and clips."""
    meter = Trace(-1)
    marks = _Marks(job.traced)
    with _callbacks(system) as callbacks:
        _fit(job, system, [marks, *callbacks], [make_layer(meter, stage) for stage in range(job.stages)])
    return RankRun(system, marks.stage, meter.spans, marks.times, marks.trace.spans if marks.trace else [])


@contextmanager
def _callbacks(system: str) -> Iterator[list[L.Callback]]:
    """What a user would add to the Trainer for this system."""
    if system == ASYNC_TRACED:
        with tempfile.TemporaryDirectory(prefix="asyncpp-bench-trace-") as folder:
            yield [PipelineTrace(folder)]
    else:
        yield [PipelineMonitor()] if system == ASYNC_MONITORED else []


def _fit(job: Job, system: str, callbacks: list[L.Callback], layers: list[nn.Module]) -> None:
    trainer = L.Trainer(
        accelerator="cpu", devices=job.stages // job.hosts, num_nodes=job.hosts, plugins=[LightningEnvironment()],
        callbacks=callbacks, strategy=_strategy(job, system),
        gradient_clip_val=_MAX_NORM, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(BenchModule(layers), _loader(job))


def _loader(job: Job) -> DataLoader:
    """Samples to be collated, as users have them; where stages compute, batches that are there, as others get them.

    With many rows to a micro-batch collating takes the training thread milliseconds, which no schedule is to blame for.
    """
    if job.work == "compute":
        return DataLoader(job.batches(), batch_size=None)  # type: ignore[arg-type]
    inputs, targets = (torch.cat(tensors) for tensors in zip(*job.batches()))
    return DataLoader(TensorDataset(inputs, targets), batch_size=job.micro_batches * job.rows)


def _strategy(job: Job, system: str) -> SyncPipelineStrategy | AsyncPipelineStrategy:
    if system == SYNC:
        return SyncPipelineStrategy(micro_batches=job.micro_batches)
    staleness = STALENESS.get(system, {})
    return AsyncPipelineStrategy(micro_batches=job.micro_batches, lookahead=job.lookahead, **staleness)


def run_fabric(job: Job, system: str, make_layer: LayerFactory) -> RankRun:
    """Run our asynchronous strategy in a plain loop, as torch's schedules run."""
    meter = Trace(-1)
    strategy = FabricAsyncStrategy(micro_batches=job.micro_batches, lookahead=job.lookahead)
    fabric = L.Fabric(
        accelerator="cpu", devices=job.stages // job.hosts, num_nodes=job.hosts, plugins=[LightningEnvironment()],
        strategy=strategy,
    )  # fmt: skip
    fabric.launch()
    model = fabric.setup_module(nn.Sequential(*[make_layer(meter, stage) for stage in range(job.stages)]))
    optimizer: Any = fabric.setup_optimizers(make_optimizer(model))
    marks = []
    for batch in job.batches():
        strategy.training_step(lambda piece: F.mse_loss(model(piece[0]), piece[1]), batch)
        optimizer.step()
        marks.append(time.perf_counter())
    strategy.flush()
    mesh = strategy.session.mesh
    assert mesh is not None
    return RankRun(system, mesh.stage, meter.spans, marks, [])


def run_floor(job: Job, system: str, make_layer: LayerFactory) -> RankRun:
    """The same forwards, backwards and updates on every process alone: no neighbour, no Trainer, no waiting."""
    meter = Trace(-1)
    layer = make_layer(meter, dist.get_rank())
    optimizer = make_optimizer(layer)
    marks = []
    for inputs, targets in job.batches():
        optimizer.zero_grad()
        for x, y in zip(inputs.split(job.rows), targets.split(job.rows)):
            (F.mse_loss(layer(x.requires_grad_()), y) / job.micro_batches).backward()
        optimizer.step()
        marks.append(time.perf_counter())
    return RankRun(system, dist.get_rank(), meter.spans, marks, [])


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
        return _run_rival(job, system, make_layer, group)
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


def _run_rival(job: Job, system: str, make_layer: LayerFactory, group: Any) -> RankRun:
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


RUNNERS: dict[str, Callable[[Job, str, LayerFactory], RankRun]] = {
    ASYNC: run_trainer,
    **dict.fromkeys(STALENESS, run_trainer),
    ASYNC_TRACED: run_trainer,
    ASYNC_MONITORED: run_trainer,
    ASYNC_FABRIC: run_fabric,
    SYNC: run_trainer,
    **dict.fromkeys(RIVALS, run_rival),
    FLOOR: run_floor,
}
