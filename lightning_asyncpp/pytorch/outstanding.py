"""What was still to come of the batch after which a checkpoint was written."""

from __future__ import annotations

from typing import NamedTuple

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

from lightning_asyncpp.pytorch import private


class Outstanding(NamedTuple):
    """What was still to come of a batch after which a checkpoint was written.

    Attributes:
        batch_end: a learning rate that waits for a metric, and whatever else follows a batch.
        validation: a validation that is due.
        epoch_end: the end of the epoch.
    """

    batch_end: bool = False
    validation: bool = False
    epoch_end: bool = False

    @classmethod
    def of(cls, trainer: L.Trainer) -> Outstanding:
        """What is still to come for a trainer that writes a checkpoint now."""
        progress = trainer.fit_loop.epoch_loop.batch_progress
        if trainer.state.fn == TrainerFn.FITTING and trainer.validating:
            return cls(epoch_end=progress.is_last_batch)
        if not trainer.training or progress.total.completed >= progress.state_dict()["total"]["processed"]:
            return cls()
        return cls(True, private.validation_is_due(trainer), progress.is_last_batch)
