"""A training with validations, checkpoints, drains, a logger and monitors leaks no threads, files or objects."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_asyncpp import PipelineMonitor
from tests.helpers.modules import MetricNet
from tests.helpers.pool import Pools
from tests.helpers.trainer import Run, Samples, make_trainer

STEPS, EVERY, BATCH = 80, 10, 8


class Counts(L.Callback):
    """Callback that counts the process's threads, files and objects, and drains the pipeline, both every 10 steps."""

    def __init__(self) -> None:
        self.counts: list[tuple[int, ...]] = []  # of numbers, which the garbage collector ignores

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step % EVERY == 5:
            trainer.strategy.drain()
        if trainer.global_step % EVERY == 0:
            gc.collect()
            tasks, files = (len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd"))
            self.counts.append((threading.active_count(), tasks, files, len(gc.get_objects())))


def count() -> list[tuple[int, ...]]:
    """Train on the ranks of a pool; return counts of Python threads, all threads, files and objects over time."""
    run, counts = Run(MetricNet, "default", correction="feedback", scheduler="decay-step", dropout=0.1), Counts()
    L.seed_everything(run.seed, verbose=False)
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)
        saving = ModelCheckpoint(folders[0], monitor="val_loss", save_top_k=2, every_n_train_steps=20, save_last=True)
        trainer = make_trainer(
            run, max_steps=STEPS, max_epochs=-1, gradient_clip_val=1.0, val_check_interval=20,
            check_val_every_n_epoch=None, logger=CSVLogger(folders[0]), log_every_n_steps=10,
            callbacks=[counts, LearningRateMonitor(), PipelineMonitor(), saving], enable_checkpointing=True,
        )  # fmt: skip
        training, validation = (DataLoader(Samples(BATCH * n, n), batch_size=BATCH) for n in (80, 5))
        trainer.fit(MetricNet(run), training, validation)
        dist.barrier()  # before the folder is deleted
    return counts.counts


def test_a_training_leaves_nothing_behind(pools: Pools) -> None:
    for counts in pools.run(2, count, timeout=200.0):
        assert len(counts) == STEPS // EVERY
        settled = counts[len(counts) // 2 :]  # after each kind of event has happened
        slack = (0, 0, 0, 200)  # caches add a few dozen objects; a leak in every step would add thousands
        for early, late, more in zip(settled[0], settled[-1], slack, strict=True):
            assert 0 < late <= early + more, settled
