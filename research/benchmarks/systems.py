"""The systems that are compared, each run once in this process.

torch's pipeline schedules go by the names of their classes. Interleaved ones put two chunks of half the work on each
process; in ZBV the chunks run in a V, so that the loss is computed where the batches enter. Their backwards that run
the gradients of inputs and weights apart promise no bubble only where a forward and both parts take equally long.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from torch import Tensor, nn
from torch.distributed import pipelining

from lightning_asyncpp import AsyncPipelineStrategy, PipelineMonitor, PipelineTrace, SyncPipelineStrategy
from lightning_asyncpp.fabric import AsyncPipelineStrategy as FabricStrategy
from research.benchmarks.run import Clock, RankRun, Run
from research.benchmarks.stages import Meter

STRATEGIES: dict[str, dict[str, Any]] = {
    "async": {},
    "async+2bw": {"staleness": "uniform"},
    "async+slack1": {"slack": 1},
    "async+slack2": {"slack": 2},
    "async+exact": {"slack": "exact"},
    **{f"async+lookahead{lookahead}": {"lookahead": lookahead} for lookahead in (1, 2, 3)},
    "sync": {},
}
"""Strategies under the Trainer, with their arguments."""
OURS: dict[str, dict[str, Any]] = {**STRATEGIES, "async+trace": {}, "async+monitor": {}}
"""The same, and with a callback that records."""
SCHEDULES: dict[str, Any] = {
    "1f1b": pipelining.Schedule1F1B,
    "gpipe": pipelining.ScheduleGPipe,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "interleaved-zb": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
}
"""torch's, in a plain loop."""
_ONE_CHUNK = ("1f1b", "gpipe")
_SPLIT_BACKWARD = ("interleaved-zb", "zbv")
SYSTEMS = (*OURS, "async+fabric", *SCHEDULES, "floor")


def run_system(run: Run, system: str) -> RankRun:
    """Run a system once; a collective call."""
    dist.barrier()
    if system in OURS:
        return _run_trainer(run, system)
    if system in SCHEDULES:
        return _run_schedule(run, system)
    others: dict[str, Callable[[Run, str], RankRun]] = {"async+fabric": _run_fabric, "floor": _run_floor}
    if system not in others:
        raise ValueError(f"--systems {system}: there is no such system. Choose from {', '.join(SYSTEMS)}.")
    return others[system](run, system)


class _Module(L.LightningModule):
    """The model of a run, as users write it."""

    def __init__(self, run: Run, meter: Meter) -> None:
        super().__init__()
        self.run, self.model = run, run.make_model(meter)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of a microbatch, logged."""
        loss = self.run.loss(self.model(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer of all systems."""
        return self.run.make_optimizer(self)


class _Notes(L.Callback):
    """Notes when each mini-batch ends, and its loss."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.loss: Any = None

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        """Note the time, and the loss."""
        self.clock.mark()
        self.loss = (outputs or {}).get("loss")  # none where it is not known


def _run_trainer(run: Run, system: str) -> RankRun:
    """One of our strategies as users run it: an ordinary Trainer that loads, logs and clips."""
    meter, notes = Meter(), _Notes()
    if system == "sync":
        strategy: Any = SyncPipelineStrategy(microbatches=run.microbatches, data_parallel_size=run.replicas)
    else:
        options = {"lookahead": run.lookahead, "data_parallel_size": run.replicas, **OURS[system]}
        strategy = AsyncPipelineStrategy(microbatches=run.microbatches, **options)
    with _recorders(run, system) as recorders, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(
            **_machine(run), strategy=strategy, callbacks=[notes, *recorders], gradient_clip_val=run.max_norm or None,
            max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, use_distributed_sampler=False,
        )  # fmt: skip
        trainer.fit(_Module(run, meter), run.loader(dist.get_rank() // run.stages))
    loss = None if strategy.batch_weight is None else float(notes.loss)  # of the replica, on its last stage
    return RankRun(system, meter.stage, meter.spans, notes.clock, loss)


@contextmanager
def _recorders(run: Run, system: str) -> Iterator[list[L.Callback]]:
    """Return the callbacks that a user would add to the Trainer for this system."""
    with tempfile.TemporaryDirectory() as folder:
        recorders: list[L.Callback] = [PipelineMonitor()] if system == "async+monitor" else []
        if run.trace or system == "async+trace":
            recorders.append(PipelineTrace(f"{run.trace or folder}/{system}"))
        yield recorders


def _machine(run: Run) -> dict[str, Any]:
    """Return arguments of a Trainer or Fabric in processes that exist already."""
    environment = LightningEnvironment()
    return {
        "accelerator": "cpu", "devices": run.processes // run.hosts, "num_nodes": run.hosts, "plugins": [environment],
    }  # fmt: skip


def _run_fabric(run: Run, system: str) -> RankRun:
    """Our asynchronous strategy in a plain loop, as torch's schedules run."""
    meter, clock = Meter(), Clock()
    options: dict[str, Any] = {"lookahead": run.lookahead, "data_parallel_size": run.replicas}
    strategy = FabricStrategy(microbatches=run.microbatches, **options)
    fabric = L.Fabric(**_machine(run), strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(run.make_model(meter))
    optimizer: Any = fabric.setup_optimizers(run.make_optimizer(model))
    loss = None
    for batch in run.batches(dist.get_rank() // run.stages):
        loss = strategy.training_step(lambda piece: run.loss(model(piece[0]), piece[1]), batch)
        optimizer.step()
        clock.mark()
    strategy.drain()
    return RankRun(system, meter.stage, meter.spans, clock, None if loss is None else float(loss))


def _run_floor(run: Run, system: str) -> RankRun:
    """The same forwards, backwards and updates in every process alone: no neighbour, no Trainer, no waiting."""
    meter, stage, clock = Meter(), dist.get_rank(), Clock()
    layer = run.make_chunk(meter, stage, stage, run.stages)
    optimizer = run.make_optimizer(layer)
    for inputs, targets in run.batches():
        optimizer.zero_grad()
        for x, y in zip(inputs.split(run.rows), targets.split(run.rows), strict=True):
            (run.loss(layer(x.requires_grad_()), y) / run.microbatches).backward()
        optimizer.step()
        clock.mark()
    return RankRun(system, meter.stage, meter.spans, clock, None)


def _run_schedule(run: Run, system: str) -> RankRun:
    """One of torch's schedules in a plain loop; replicas reduce their gradients after the flush."""
    replica, stage = divmod(dist.get_rank(), run.stages)
    pipelines: list[Any] = [
        dist.new_group([r * run.stages + s for s in range(run.stages)]) for r in range(run.replicas)
    ]
    reductions: list[Any] = [
        dist.new_group([r * run.stages + s for r in range(run.replicas)]) for s in range(run.stages)
    ]
    meter, clock, losses = Meter(), Clock(), list[Tensor]()
    indices = chunks_of(system, stage, run.stages)
    count = run.stages * len(indices)
    chunks = nn.ModuleList(run.make_chunk(meter, stage, i, count, system in _SPLIT_BACKWARD) for i in indices)
    stages: Any = [
        _make_stage(run, chunk, index, count, pipelines[replica]) for chunk, index in zip(chunks, indices, strict=True)
    ]
    schedule = SCHEDULES[system](stages[0] if len(stages) == 1 else stages, run.microbatches, loss_fn=run.loss)
    optimizer = run.make_optimizer(chunks)
    is_last = count - 1 in indices
    for inputs, targets in run.batches(replica):
        optimizer.zero_grad()
        losses.clear()
        last = {"target": targets, "losses": losses} if is_last else {}
        schedule.step(*((inputs,) if 0 in indices else ()), return_outputs=False, **last)
        if run.replicas > 1:
            _average_gradients(chunks, reductions[stage], run.replicas)
        optimizer.step()
        clock.mark()
    loss = float(torch.stack(losses).detach().mean()) if is_last else None
    return RankRun(system, meter.stage, meter.spans, clock, loss)


def _make_stage(run: Run, chunk: nn.Module, index: int, count: int, group: Any) -> pipelining.PipelineStage:
    """Shapes are given, or torch would run every chunk once to find them out."""
    inputs, outputs = run.boundary(index, count), run.boundary(index + 1, count)
    arguments = (inputs.requires_grad_(index > 0),), (outputs.requires_grad_(),)
    return pipelining.PipelineStage(chunk, index, count, torch.device("cpu"), *arguments, group=group)


def chunks_of(system: str, rank: int, processes: int) -> tuple[int, ...]:
    """Return the chunks that a process has under one of torch's schedules: one, or two in a loop or in a V."""
    if system in _ONE_CHUNK:
        return (rank,)
    return (rank, 2 * processes - 1 - rank) if system == "zbv" else (rank, processes + rank)


def _average_gradients(module: nn.Module, group: dist.ProcessGroup, replicas: int) -> None:
    """All gradients in one message, as DistributedDataParallel's buckets would be, but not overlapped."""
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, mean in zip(gradients, (flat / replicas).split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))
