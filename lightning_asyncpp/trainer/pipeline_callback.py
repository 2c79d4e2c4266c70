"""First callback of the Trainer, which prepares weights and metrics for the callbacks after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import Checkpoint, LambdaCallback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_asyncpp.core.engine import Engine
from lightning_asyncpp.core.ranks.agreement import StopRounds, all_gather_object, batches_behind
from lightning_asyncpp.core.session import PipelineSession
from lightning_asyncpp.trainer import private
from lightning_asyncpp.trainer.batch_ends import BatchEnds
from lightning_asyncpp.trainer.preemption import Preemption, save_nothing_on_exception
from lightning_asyncpp.trainer.step_log import StepLog


class PipelineCallback(Callback):
    """Callback that drains the pipeline (finishes what is in flight) and shares metrics before other callbacks.

    After SIGTERM, or the signal at which SLURM requeues the job, the run ends on all ranks after the same batch. In
    training, ranks agree on the batch by an update's control message (a vector summed over ranks); in an evaluation, by
    :class:`StopRounds`.

    Args:
        trainer: trainer of the run.
        session: the started pipeline.
        step_log: values that the steps log.
        drain: function that finishes all microbatches in flight and applies all outstanding updates.
        batch_ends: queue of the hooks that are called after the update of their batch.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        session: PipelineSession,
        step_log: StepLog,
        drain: Callable[[], None],
        batch_ends: BatchEnds,
    ) -> None:
        self.session = session
        self.step_log = step_log
        self.drain = drain
        self._batch_ends = batch_ends
        self.preemption = Preemption(trainer, self.request_stop)
        mesh, settings = session.running().mesh, session.running().settings
        self._rounds = StopRounds(mesh, batches_behind(mesh.num_stages, settings.microbatches))
        self._is_preempted = False  # whether all ranks know of a signal
        self._stopping = False

    def install(self, trainer: L.Trainer) -> None:
        """Become the trainer's first callback, add calls to Lightning's loops, and remove its broadcast of SIGTERM."""
        callbacks = [c for c in trainer.callbacks if not isinstance(c, (PipelineCallback, BeforeSaves))]  # type: ignore[attr-defined]
        place = next((i for i, c in enumerate(callbacks) if isinstance(c, Checkpoint)), len(callbacks))
        callbacks.insert(place, BeforeSaves(on_train_batch_end=lambda *_: self._before_saves(trainer)))
        trainer.callbacks = [self, *callbacks]  # type: ignore[attr-defined]
        private.drop_sigterm_broadcast(trainer)
        private.before_step_logging(trainer, lambda: self.at_end_of_batch(trainer))
        private.at_end_of_epoch(trainer, lambda: self._before_end_of_epoch(trainer), self.step_log.share_epoch)

    def request_stop(self) -> None:
        """Ask all ranks to end after the same batch; safe to call in a signal handler."""
        if self.session.engine is not None:
            self.session.engine.updates.requested.interrupted = True

    def on_train_start(self, trainer: L.Trainer, pl_module: LightningModule) -> None:
        """Install the signal handlers."""
        self.preemption.install()

    on_sanity_check_start = on_test_start = on_predict_start = on_train_start

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Drain if what follows needs the newest weights, log layers' statistics, and end the run if ranks agreed."""
        engine = self.session.engine
        assert engine is not None
        self._hold_back_stop(trainer)
        if must_drain := self._must_drain(trainer, batch_idx, engine):
            self.drain()
        self.step_log.end_batch()
        if must_drain:
            self.step_log.share_metrics()
        if engine.accumulating:  # a stop waits for the end of the mini-batch
            return
        if engine.updates.agreed.interrupted:
            self._is_preempted = True
            if not _is_finished(trainer, batch_idx):
                self.preemption.stop()
        if engine.updates.agreed.finished:
            self._stopping = trainer.should_stop = True

    def _before_saves(self, trainer: L.Trainer) -> None:
        """Share the values logged so far in this batch if a checkpoint callback may use them now."""
        if _checkpoint_is_due(trainer) or any(map(private.saves_by_time, trainer.checkpoint_callbacks)):
            self.step_log.share_metrics()

    def at_end_of_batch(self, trainer: L.Trainer) -> None:
        """Hold back a stop, and share the metric that a ``ReduceLROnPlateau`` is about to read."""
        self._hold_back_stop(trainer)
        if _plateau_is_due(trainer):
            self.step_log.share_metrics()

    def _hold_back_stop(self, trainer: L.Trainer) -> None:
        """Replace ``trainer.should_stop`` by a request to all ranks, since other ranks may not have set it."""
        if trainer.should_stop and not self._stopping:
            trainer.should_stop = False
            self.session.running().updates.requested.finished = True

    def _before_end_of_epoch(self, trainer: L.Trainer) -> None:
        """In training, drain, since a hook may have ended the epoch; end an evaluation if ranks agreed to end it."""
        if trainer.training:
            self.drain()
            self.step_log.log_counted()
            self.step_log.share_metrics()
        else:
            self._stop_evaluation_if_agreed(after_batch=False)

    def on_validation_start(self, trainer: L.Trainer, pl_module: LightningModule) -> None:
        """Install the signal handlers; end the run here if a signal has asked for it."""
        self.preemption.install()
        if self._is_preempted:
            raise SIGTERMException

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """End the evaluation after this batch if the ranks have agreed to end it."""
        self._stop_evaluation_if_agreed(after_batch=True)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_predict_epoch_end(self, trainer: L.Trainer, pl_module: LightningModule) -> None:
        """End the prediction if the ranks have agreed to end it."""
        self._stop_evaluation_if_agreed(after_batch=False)

    def on_exception(self, trainer: L.Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End a run that all ranks agreed to end; after a failure, let no callback save."""
        engine = self.session.engine
        agreed = isinstance(exception, SIGTERMException) and self._is_preempted
        if not agreed or engine is None or not engine.idle:
            self.session.watch.fail(exception)
            save_nothing_on_exception(trainer)
            return
        try:
            signals = [int(text) for text in all_gather_object(engine.mesh, str(self.preemption.received))]
            self.preemption.end(exception, signals)  # type: ignore[arg-type]
        except BaseException as error:
            self.session.watch.fail(error)
            raise

    def _stop_evaluation_if_agreed(self, after_batch: bool) -> None:
        """End the evaluation if the ranks have agreed to end it.

        Args:
            after_batch: whether this is after a batch, and not at the end of a loader.
        """
        engine = self.session.running()
        interrupted = engine.updates.requested.interrupted
        if not after_batch:
            engine.end_evaluation()  # must come before this rank waits for the other ranks
        if self._rounds.after_batch(interrupted) if after_batch else self._rounds.finish(interrupted):
            self._is_preempted = True
            raise SIGTERMException

    def _must_drain(self, trainer: L.Trainer, batch_idx: int, engine: Engine) -> bool:
        agreed, batch_ends = engine.updates.agreed, self._batch_ends
        if (agreed.interrupted or agreed.finished) and not engine.accumulating:
            return True
        if _is_last(trainer, batch_idx) or _has_all_steps(trainer) or private.validation_is_due(trainer):
            return True
        if batch_ends.kinds and batch_ends.meets_gradients():
            return True
        return _checkpoint_is_due(trainer)


class BeforeSaves(LambdaCallback):
    """Callback that shares what earlier callbacks logged after a batch, before checkpoint callbacks use it."""


def _checkpoint_is_due(trainer: L.Trainer) -> bool:
    return any(private.checkpoint_is_due(callback, trainer.global_step) for callback in trainer.checkpoint_callbacks)


def _plateau_is_due(trainer: L.Trainer) -> bool:
    """Return whether a ``ReduceLROnPlateau`` reads a metric after this batch."""
    waiting = [c for c in trainer.lr_scheduler_configs if c.reduce_on_plateau and c.interval == "step"]
    return any((trainer.fit_loop.batch_idx + 1) % config.frequency == 0 for config in waiting)


def _is_last(trainer: L.Trainer, batch_idx: int) -> bool:
    return bool(trainer.is_last_batch or batch_idx + 1 >= trainer.num_training_batches)


def _has_all_steps(trainer: L.Trainer) -> bool:
    return trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps


def _is_finished(trainer: L.Trainer, batch_idx: int) -> bool:
    """Return whether this is the last training batch."""
    epochs = trainer.max_epochs
    is_last_epoch = epochs not in (None, -1) and trainer.current_epoch + 1 >= epochs
    return _has_all_steps(trainer) or (is_last_epoch and _is_last(trainer, batch_idx))
