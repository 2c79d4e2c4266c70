"""A training script for torchrun that goes on from its last checkpoint; a rank of it kills itself once.

Arguments: the folder for checkpoints and results, and the signal that rank 1 sends to itself, the first time.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch

from tests.helpers.resumable import RESUMABLE_RUN, saving
from tests.helpers.trainer import Run, arrays, make_trainer, val_loaders
from tests.trainer.checkpoint.preempted import Resumable

KILLED_AT = 7


def run_in(folder: Path) -> Run:
    """12 mini-batches over epochs of 5, with a checkpoint after every second."""
    trainer = {"max_epochs": -1, "max_steps": 12, "enable_checkpointing": True, "gradient_clip_val": 0.5}
    callbacks = (saving(folder / "checkpoints", save_last=True, every_n_train_steps=2),)
    return replace(RESUMABLE_RUN, module=Resumable, trainer=trainer, callbacks=callbacks, val_samples=(20,))


class Killed(L.Callback):
    """Notes how often the run was started, and sends the signal in the first of them."""

    def __init__(self, folder: Path, number: int) -> None:
        self.started, self.number = folder / "started", number

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1:
            with self.started.open("a") as file:
                file.write(f"{trainer.global_step}\n")

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == KILLED_AT and len(self.started.read_text().split()) == 1:
            os.kill(os.getpid(), self.number)


def main() -> None:
    folder, number = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    run = run_in(folder)
    L.seed_everything(run.seed)
    module = run.module(run)
    trainer = make_trainer(run, callbacks=[Killed(folder, number)])
    trainer.fit(module, None, val_loaders(run), ckpt_path="last", weights_only=True)
    np.savez(folder / f"{trainer.global_rank}.npz", **arrays(dict(module.named_parameters())))


if __name__ == "__main__":
    main()
