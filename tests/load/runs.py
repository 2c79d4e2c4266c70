"""Scenarios: long trainings of a tiny model with all that goes on beside the steps, on the ranks of a pool."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_asyncpp import AsyncPipelineStrategy, PipelineMonitor
from lightning_asyncpp.fabric import AsyncPipelineStrategy as FabricAsyncPipelineStrategy
from tests.core.cases import make_model
from tests.load.probe import Probe, Sample, watched_works
from tests.load.turns import Turns
from tests.trainer.modules import MetricNet
from tests.trainer.runs import Run, Samples

BATCH = 8


@dataclass(frozen=True)
class Load:
    """A long training.

    Attributes:
        steps: number of updates.
        every: steps between two looks at the process.
        epoch, validate, save, drain: steps between two of each; a validation has 5 batches.
        options: of the strategy.
        turns: lets two trainings take turns after some steps, a lap of ``every`` steps each; None: nobody waits.
        kept: open file and thread that a callback leaves behind at every drain, to see that it is seen.
    """

    steps: int
    every: int = 50
    epoch: int = 1000
    validate: int = 250
    save: int = 400
    drain: int = 70
    options: dict[str, Any] = field(default_factory=lambda: {"micro_batches": 4})
    turns: Turns | None = None
    kept: bool = False

    def loader(self) -> DataLoader:
        """The training batches."""
        data = Samples(BATCH * self.epoch * self.options.get("data_parallel_size", 1))
        return DataLoader(data, batch_size=BATCH)


class Looks(L.Callback):
    """Tells a probe of the Trainer's steps, drains the pipeline now and then, and waits for its turn."""

    def __init__(self, probe: Probe, load: Load) -> None:
        self.probe, self.load = probe, load
        self._kept: list[Any] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.load.turns is not None:
            self.load.turns.wait()
        self.probe.start()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step % self.load.drain == 0:
            trainer.strategy.drain()
            if self.load.kept:
                self._kept.append(open(os.devnull))  # noqa: SIM115 - that is the point
                threading.Thread(target=time.sleep, args=(60.0,), daemon=True).start()
        self.probe.step()
        turns, beyond = self.load.turns, trainer.global_step - (self.load.turns.before if self.load.turns else 0)
        if turns is not None and beyond >= 0 and beyond % self.load.every == 0:
            turns.pass_on()
            if trainer.global_step < self.load.steps:
                turns.wait()
                self.probe.start()


def trainer_under_load(load: Load) -> list[Sample]:
    """``Trainer.fit`` with validations, checkpoints, drains, a logger, torchmetrics objects and monitors."""
    run = Run(MetricNet, correction="feedback", scheduler="decay-step", dropout=0.1)
    L.seed_everything(run.seed, verbose=False)
    with watched_works() as works, tempfile.TemporaryDirectory() as folder:
        folder = _common(folder)
        probe = Probe(load.every, works)
        saving = {"dirpath": folder, "monitor": "val_loss", "save_top_k": 2, "every_n_train_steps": load.save}
        trainer = L.Trainer(
            accelerator="cpu", devices=dist.get_world_size(), strategy=AsyncPipelineStrategy(**load.options),
            max_steps=load.steps, max_epochs=-1, gradient_clip_val=1.0, val_check_interval=load.validate,
            check_val_every_n_epoch=None, limit_val_batches=5, log_every_n_steps=50, num_sanity_val_steps=1,
            logger=CSVLogger(folder), enable_progress_bar=False, enable_model_summary=False,
            callbacks=[
                Looks(probe, load), LearningRateMonitor(), PipelineMonitor(),
                ModelCheckpoint(**saving, save_last=True),
            ],
        )  # fmt: skip
        trainer.fit(MetricNet(run), load.loader(), DataLoader(Samples(50, 1), batch_size=BATCH))
        dist.barrier()  # before the folder goes
    return probe.samples


def fabric_under_load(load: Load) -> list[Sample]:
    """A loop over Fabric with evaluations, checkpoints and flushes."""
    run = Run(MetricNet, correction="feedback", scheduler="decay-step")
    strategy = FabricAsyncPipelineStrategy(**load.options)
    fabric = L.Fabric(strategy=strategy, devices=dist.get_world_size(), accelerator="cpu")
    fabric.launch()
    fabric.seed_everything(run.seed, verbose=False)
    model = fabric.setup_module(make_model(0.1))
    optimizer = fabric.setup_optimizers(run.make_optimizer(list(model.named_parameters())))

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.mse_loss(model(batch["x"]), batch["y"])

    evaluated = next(iter(DataLoader(Samples(BATCH, 1), batch_size=BATCH)))
    done = 0
    with watched_works() as works, tempfile.TemporaryDirectory() as folder:
        folder = _common(folder)
        probe = Probe(load.every, works)
        probe.start()
        while done < load.steps:
            for batch in fabric.setup_dataloaders(load.loader()):
                strategy.training_step(step, batch)
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                done += 1
                if done % load.validate == 0:
                    model.eval()
                    strategy.evaluation_step(step, evaluated)
                    model.train()
                if done % load.save == 0:
                    fabric.save(f"{folder}/last.ckpt", {"model": model, "optimizer": optimizer, "step": done})
                if done % load.drain == 0:
                    strategy.flush()
                probe.step()
                if done == load.steps:
                    break
        strategy.flush()
        dist.barrier()
    return probe.samples


def _common(folder: str) -> str:
    """Rank 0's folder, on all ranks."""
    folders = [folder]
    dist.broadcast_object_list(folders)
    return folders[0]
