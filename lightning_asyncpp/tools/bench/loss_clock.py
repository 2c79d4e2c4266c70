"""The callback that a benchmark adds to a training: how long had it trained when the validation loss was what?"""

from __future__ import annotations

import json
import time
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

METRIC = "val_loss"


class LossClock(Callback):
    """Writes the curve of the validation loss over training time, as lists [step, seconds, loss] in JSON.

    The clock stands still while validations run. That a pipeline is emptied before, and fills up again after, counts.

    Args:
        file: to write, at the end of the training, by rank 0.
    """

    def __init__(self, file: str) -> None:
        self.file = Path(file)
        self.curve: list[tuple[int, float, float]] = []
        self._started = 0.0
        self._paused = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._started = time.perf_counter()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        self._paused = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note time and loss, and go on."""
        if trainer.sanity_checking:
            return
        seconds = self._paused - self._started
        self.curve.append((trainer.global_step, seconds, float(trainer.callback_metrics[METRIC])))
        self._started += time.perf_counter() - self._paused

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the curve."""
        if trainer.is_global_zero:
            self.file.write_text(json.dumps(self.curve))
