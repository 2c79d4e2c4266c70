"""The systems that a benchmark compares, each run once on this process's stage."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_asyncpp.fabric import AsyncPipelineStrategy as FabricAsyncStrategy
from lightning_asyncpp.pipeline.trace import Trace
from lightning_asyncpp.pytorch import AsyncPipelineStrategy, SyncPipelineStrategy
from lightning_asyncpp.tools.bench.job import (
    ASYNC,
    ASYNC_CLIPPED,
    ASYNC_FABRIC,
    ASYNC_FRESH,
    FLOOR,
    GPIPE,
    ONE_F_ONE_B,
    SYNC,
    Job,
    RankRun,
)

LayerFactory = Callable[[Trace], nn.Module]
LEARNING_RATE = 0.01


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


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """Plain SGD."""
    return torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)


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
    """Run one of our strategies through an ordinary Trainer."""
    meter = Trace(-1)
    marks = _Marks(job.traced)
    trainer = L.Trainer(
        accelerator="cpu", devices=job.stages, plugins=[LightningEnvironment()], callbacks=[marks],
        strategy=_strategy(job, system),
        gradient_clip_val=1e-3 if system == ASYNC_CLIPPED else None, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    module = BenchModule([make_layer(meter) for _ in range(job.stages)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(job.batches(), batch_size=None))  # type: ignore[arg-type]
    return RankRun(system, marks.stage, meter.spans, marks.times, marks.trace.spans if marks.trace else [])


def _strategy(job: Job, system: str) -> SyncPipelineStrategy | AsyncPipelineStrategy:
    if system == SYNC:
        return SyncPipelineStrategy(micro_batches=job.micro_batches)
    fresh = system == ASYNC_FRESH
    return AsyncPipelineStrategy(micro_batches=job.micro_batches, lookahead=job.lookahead, fresh_last_stage=fresh)


def run_fabric(job: Job, system: str, make_layer: LayerFactory) -> RankRun:
    """Run our asynchronous strategy in a plain loop, as torch's schedules run."""
    meter = Trace(-1)
    strategy = FabricAsyncStrategy(micro_batches=job.micro_batches, lookahead=job.lookahead)
    fabric = L.Fabric(accelerator="cpu", devices=job.stages, plugins=[LightningEnvironment()], strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(nn.Sequential(*[make_layer(meter) for _ in range(job.stages)]))
    optimizer: Any = fabric.setup_optimizers(make_optimizer(model))
    marks = []
    for batch in job.batches():
        strategy.training_step(lambda piece: F.mse_loss(model(piece[0]), piece[1]), batch)
        optimizer.step()
        marks.append(time.perf_counter())
    strategy.flush()
    stage = job.stages - 1 - fabric.global_rank
    return RankRun(system, stage, meter.spans, marks, [])


def run_torch_schedule(job: Job, system: str, make_layer: LayerFactory) -> RankRun:
    """Run one of ``torch.distributed.pipelining``'s schedules in a plain loop."""
    meter = Trace(-1)
    rank = dist.get_rank()
    layer = make_layer(meter)
    stage = PipelineStage(layer, rank, job.stages, torch.device("cpu"))
    schedule_class = Schedule1F1B if system == ONE_F_ONE_B else ScheduleGPipe
    schedule = schedule_class(stage, job.micro_batches, loss_fn=F.mse_loss)
    optimizer = make_optimizer(layer)
    marks = []
    for inputs, targets in job.batches():
        optimizer.zero_grad()
        first = (inputs,) if rank == 0 else ()
        last: dict[str, Any] = {"target": targets, "losses": []} if rank == job.stages - 1 else {}
        schedule.step(*first, return_outputs=False, **last)
        optimizer.step()
        marks.append(time.perf_counter())
    return RankRun(system, rank, meter.spans, marks, [])


def run_floor(job: Job, system: str, make_layer: LayerFactory) -> RankRun:
    """The same forwards, backwards and updates on every process alone: no neighbour, no Trainer, no waiting."""
    meter = Trace(-1)
    layer = make_layer(meter)
    optimizer = make_optimizer(layer)
    marks = []
    for inputs, targets in job.batches():
        optimizer.zero_grad()
        for x, y in zip(inputs.split(job.rows), targets.split(job.rows)):
            (F.mse_loss(layer(x.requires_grad_()), y) / job.micro_batches).backward()
        optimizer.step()
        marks.append(time.perf_counter())
    return RankRun(system, dist.get_rank(), meter.spans, marks, [])


RUNNERS: dict[str, Callable[[Job, str, LayerFactory], RankRun]] = {
    ASYNC: run_trainer,
    ASYNC_CLIPPED: run_trainer,
    ASYNC_FRESH: run_trainer,
    ASYNC_FABRIC: run_fabric,
    SYNC: run_trainer,
    ONE_F_ONE_B: run_torch_schedule,
    GPIPE: run_torch_schedule,
    FLOOR: run_floor,
}
