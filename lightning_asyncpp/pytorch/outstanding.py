"""What was still to come of the batch after which a checkpoint was written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

from lightning_asyncpp.pytorch import private


class Outstanding(NamedTuple):
    """What was still to come of a batch after which a checkpoint was written.

    Attributes:
        batch_end: a learning rate that waits for a metric, and whatever else follows a batch.
        validation: a validation that is due.
        epoch_end: the end of the epoch.
        rest_of_epoch: batches of an epoch that the end of the run (``max_steps``, a stop) has cut short. Lightning
            counts it as any other epoch; a run that goes on goes on in it.
    """

    batch_end: bool = False
    validation: bool = False
    epoch_end: bool = False
    rest_of_epoch: bool = False

    @classmethod
    def of(cls, trainer: L.Trainer) -> Outstanding:
        """What is still to come for a trainer that writes a checkpoint now."""
        progress = trainer.fit_loop.epoch_loop.batch_progress
        if trainer.state.fn == TrainerFn.FITTING and trainer.validating:
            return cls(epoch_end=progress.is_last_batch)
        counts, epochs = (loop.state_dict()["total"] for loop in (progress, trainer.fit_loop.epoch_progress))
        # The last batch of an epoch may have been skipped, and is never completed.
        is_over = counts["completed"] >= counts["processed"] or epochs["processed"] >= epochs["ready"]
        if is_over or not trainer.training:
            return cls()
        return cls(True, private.validation_is_due(trainer), progress.is_last_batch)


def is_cut_short(trainer: L.Trainer) -> bool:
    """Whether the run ends with an epoch of which batches are left; to be asked when that epoch ends."""
    loop = trainer.fit_loop.epoch_loop
    has_all_steps = -1 < loop.max_steps <= loop.global_step
    return not loop.batch_progress.is_last_batch and (has_all_steps or trainer.should_stop)


def count_as_unfinished(fit_loop: Mapping[str, Any]) -> None:
    """Let a run go on in the epoch that was the last one of another.

    Args:
        fit_loop: the state of the Trainer's loop in the checkpoint, which is changed.
    """
    for counts in (fit_loop["epoch_progress"]["total"], fit_loop["epoch_progress"]["current"]):
        counts["processed"] = min(counts["processed"], counts["started"] - 1)
        counts["completed"] = min(counts["completed"], counts["processed"])
