"""The systems that a benchmark compares, each run once on this process's stage."""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_asyncpp.fabric import AsyncPipelineStrategy as FabricAsyncStrategy
from lightning_asyncpp.pipeline.trace import Trace
from lightning_asyncpp.pytorch import AsyncPipelineStrategy, PipelineMonitor, PipelineTrace, SyncPipelineStrategy
from lightning_asyncpp.tools.bench.job import Job, RankRun
from lightning_asyncpp.tools.bench.names import (
    ASYNC,
    ASYNC_FABRIC,
    ASYNC_FRESH,
    ASYNC_MONITORED,
    ASYNC_TRACED,
    FLOOR,
    RIVALS,
    SYNC,
)
from lightning_asyncpp.tools.bench.rivals import run_rival
from lightning_asyncpp.tools.bench.work import LayerFactory, make_optimizer

_MAX_NORM = 1e-3  # so small that gradients are always scaled


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
    fresh = system == ASYNC_FRESH
    return AsyncPipelineStrategy(micro_batches=job.micro_batches, lookahead=job.lookahead, fresh_last_stage=fresh)


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


RUNNERS: dict[str, Callable[[Job, str, LayerFactory], RankRun]] = {
    ASYNC: run_trainer,
    ASYNC_FRESH: run_trainer,
    ASYNC_TRACED: run_trainer,
    ASYNC_MONITORED: run_trainer,
    ASYNC_FABRIC: run_fabric,
    SYNC: run_trainer,
    **dict.fromkeys(RIVALS, run_rival),
    FLOOR: run_floor,
}
