"""What a checkpoint says about Lightning's loops when a run ends between two of their steps, and how it is taken up.

Lightning resumes exactly after a training batch. It forgets a validation that was due or under way, its counters are
off after one, and a run that counts updates (``max_steps``) would begin the epoch that had just ended again.
"""

from __future__ import annotations

import lightning as L
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.states import TrainerFn

from lightning_asyncpp.trainer import private
from lightning_asyncpp.trainer.checkpoint.progress import Outstanding, Progress


def mark_validation_as_outstanding(trainer: L.Trainer) -> None:
    """Have a run that resumes from the next checkpoint validate first, from the first batch on."""
    progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
    before = progress.total.completed - progress.current.completed
    for counts, done in ((progress.total, before), (progress.current, 0)):
        # As if interrupted in the first batch, which Lightning knows how to take up.
        counts.load_state_dict({"ready": done + 1, "started": done + 1, "processed": done, "completed": done})
    progress.is_last_batch = False


def accumulate_as_scheduled(trainer: L.Trainer) -> None:
    """Set what Lightning's callback sets when an epoch begins, also in a run that is resumed in the middle of one.

    Call this in the strategy's ``on_train_start``: the callback's own refuses what somebody else has set.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            callback.on_train_epoch_start(trainer)


class ResumedLoops:
    """Mends the loops' state of a Trainer that resumes; does nothing for one that begins.

    Args:
        trainer: whose state was restored.
        progress: says what was outstanding.
    """

    def __init__(self, trainer: L.Trainer, progress: Progress) -> None:
        self._trainer, self._progress = trainer, progress
        self._outstanding = Outstanding()
        self._in_epoch_end = False  # the checkpoint was written by a hook there
        self._max_steps: int | None = None

    def before_training(self) -> None:
        """Call this when everything was restored and no loop runs yet."""
        if self._trainer.state.fn != TrainerFn.FITTING:
            return
        fit_loop, epoch_loop = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop
        epochs = fit_loop.epoch_progress.total
        processed = fit_loop.epoch_progress.state_dict()["total"]["processed"]
        self._in_epoch_end = epochs.ready == processed > epochs.completed
        if self._in_epoch_end:
            fit_loop.epoch_progress.increment_completed()
        if epoch_loop.restarting and epochs.ready == epochs.completed > 0:
            epoch_loop.restarting = False  # that epoch is over; the next begins
        outstanding = self._outstanding = Outstanding(*self._progress.outstanding)
        if outstanding.batch_end and (outstanding.validation or outstanding.epoch_end):
            epoch_loop.batch_progress.increment_completed()  # else Lightning would begin with the next batch
        if outstanding.validation:
            mark_validation_as_outstanding(self._trainer)
        steps, more_to_do = epoch_loop.max_steps, outstanding.epoch_end or self._validation_is_outstanding()
        if more_to_do and -1 < steps <= epoch_loop.global_step:
            self._max_steps = steps  # the loop would end before that
            epoch_loop.max_steps = epoch_loop.global_step + 1

    def at_start(self) -> None:
        """Call this when training starts: Lightning knows by now where it resumes, and counts rightly from here on."""
        val_loop = self._trainer.fit_loop.epoch_loop.val_loop
        if self._in_epoch_end:
            private.end_epoch(self._trainer)
        elif val_loop.restarted_mid_evaluation:
            val_loop.batch_progress.total.reset_on_restart()
        elif self._outstanding.rest_of_epoch and private.validation_is_due(self._trainer):
            private.pass_over_end_of_batch(self._trainer)
        elif self._outstanding.batch_end:
            private.end_batch(self._trainer, counted=self._outstanding.epoch_end)

    def at_validation(self) -> None:
        """Call this when a validation starts."""
        self._restore_max_steps()

    def at_epoch_end(self) -> None:
        """Call this when an epoch ends; Lightning lets no ``ReduceLROnPlateau`` step at the end of a resumed one.

        Its metrics are whole: they were resumed, too.
        """
        self._restore_max_steps()
        self._progress.end_epoch()
        private.count_epoch_as_whole(self._trainer)

    def _restore_max_steps(self) -> None:
        if self._max_steps is not None:
            self._trainer.fit_loop.epoch_loop.max_steps, self._max_steps = self._max_steps, None

    def _validation_is_outstanding(self) -> bool:
        val_loop = self._trainer.fit_loop.epoch_loop.val_loop
        counts = val_loop.batch_progress.total
        return val_loop.restarting and counts.ready == counts.completed + 1
