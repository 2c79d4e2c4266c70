"""The callback that stands first in line: what others read after a batch, weights or metrics, it has made ready."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.pytorch import Callback, LightningModule

from lightning_asyncpp.pipeline.session import PipelineSession
from lightning_asyncpp.pytorch import private
from lightning_asyncpp.pytorch.step_metrics import StepMetrics


class Conductor(Callback):
    """Drains the pipeline when what follows a batch reads weights or metrics, and logs what became known.

    Args:
        session: the pipeline.
        step_metrics: what its steps logged.
        drain: finishes what is in flight and applies every update.
    """

    def __init__(self, session: PipelineSession, step_metrics: StepMetrics, drain: Callable[[], None]) -> None:
        self.session = session
        self.step_metrics = step_metrics
        self.drain = drain
        self._stopping = False

    def install(self, trainer: L.Trainer) -> None:
        """Stand in front of the trainer's callbacks and take over what Lightning does per batch."""
        callbacks = [c for c in trainer.callbacks if not isinstance(c, Conductor)]  # type: ignore[attr-defined]
        trainer.callbacks = [self, *callbacks]  # type: ignore[attr-defined]
        private.replace_sigterm_broadcast(trainer, lambda: self.on_sigterm(trainer))
        private.replace_step_logging(trainer, lambda: self.at_end_of_batch(trainer))

    def on_sigterm(self, trainer: L.Trainer) -> None:
        """Ask all ranks to end after a common batch."""
        engine = self.session.engine
        if engine is not None and self.session.optimizer is not None:
            engine.updates.requested.interrupted = True
        else:
            private.set_received_sigterm(trainer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what the last update brought; drain if anything that follows needs it."""
        self.step_metrics.log_received()
        engine = self.session.running()
        if self._must_drain(trainer, batch_idx):
            self.drain()
            self.step_metrics.log_received()
        if engine.updates.agreed.interrupted:
            private.set_received_sigterm(trainer)
        if engine.updates.agreed.finished:
            self._stopping = trainer.should_stop = True

    def at_end_of_batch(self, trainer: L.Trainer) -> None:
        """Hold back a stop that a callback of this rank alone may have decided on, until all ranks know of it."""
        if trainer.should_stop and not self._stopping:
            trainer.should_stop = False
            self.session.running().updates.requested.finished = True

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: LightningModule) -> None:
        """Drain if the last batch was skipped (``on_train_batch_start`` returned -1); log what is left of the epoch."""
        self.drain()
        self.step_metrics.log_rest_of_epoch()
        self.step_metrics.log_metric_objects(training=True)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: LightningModule) -> None:
        """Log torchmetrics objects of loaders without a length."""
        self.step_metrics.log_metric_objects(training=False)

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: LightningModule) -> None:
        """Log torchmetrics objects of loaders without a length."""
        self.step_metrics.log_metric_objects(training=False)

    def on_exception(self, trainer: L.Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let callbacks that save on an exception fail instead of waiting for ranks that do not answer."""
        engine = self.session.engine
        agreed_and_drained = engine is not None and engine.updates.agreed.interrupted and engine.idle
        if not agreed_and_drained:
            self.session.fail(exception)

    def _must_drain(self, trainer: L.Trainer, batch_idx: int) -> bool:
        engine = self.session.running()
        last = trainer.is_last_batch or batch_idx + 1 >= trainer.num_training_batches
        done = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
        stopping = engine.updates.agreed.interrupted or engine.updates.agreed.finished
        saving = any(private.checkpoint_is_due(c, trainer.global_step) for c in trainer.checkpoint_callbacks)
        plateau = any(c.reduce_on_plateau and c.interval == "step" for c in trainer.lr_scheduler_configs)
        return last or done or stopping or saving or plateau or private.validation_is_due(trainer)
