"""Logs what layers counted in a training step, where no pipeline does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L
from lightning.pytorch import Callback, LightningModule


class StatisticsLog(Callback):
    """Logs metrics at the end of a training batch; in ``optimizer_step``, where they are made, Lightning allows none.

    Attributes:
        metrics: name -> value, to be logged once.
    """

    def __init__(self) -> None:
        self.metrics: Mapping[str, float] = {}

    def install(self, trainer: L.Trainer) -> None:
        """Stand among the trainer's callbacks, once."""
        others = [c for c in trainer.callbacks if not isinstance(c, StatisticsLog)]  # type: ignore[attr-defined]
        trainer.callbacks = [self, *others]  # type: ignore[attr-defined]

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what the update of this batch brought."""
        if self.metrics:
            pl_module.log_dict(dict(self.metrics))
            self.metrics = {}
