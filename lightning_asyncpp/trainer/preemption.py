"""Preemption: the end of a run by a signal, with a checkpoint and an exit code."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info


class Preemption:
    """Replacement of Lightning's signal handlers that ends a run when all ranks have agreed to end it.

    A signal may come at any point, so its handler only records it. Lightning's handlers, which communicate or save,
    are called later, when all ranks are between the same two batches.

    Args:
        trainer: trainer of the run.
        on_signal: function called at a signal.

    Attributes:
        received: first signal that this process received; 0 if none.
        ended: whether :meth:`end` has ended the run.
    """

    def __init__(self, trainer: L.Trainer, on_signal: Callable[[], None]) -> None:
        self.received = 0
        self.ended = False
        self._trainer, self._on_signal = trainer, on_signal
        self._handlers: dict[int, Any] = {}  # signal -> Lightning's handler

    def install(self) -> None:
        """Install the signal handlers; Lightning restores the earlier ones after the run."""
        for number in {signal.SIGTERM, _requeue_signal(self._trainer) or signal.SIGTERM}:
            handlers = getattr(signal.getsignal(number), "signal_handlers", None)  # Lightning's, then the user's
            if handlers and threading.current_thread() is threading.main_thread():
                self._handlers[number] = handlers[0]
                signal.signal(number, lambda received, _: self.receive(received))

    def receive(self, signum: int) -> None:
        """Record a signal; only the first one counts."""
        self.received = self.received or signum
        self._on_signal()

    def stop(self) -> None:
        """Make Lightning end the run after this batch (or this epoch if it ends here); all ranks call this together."""
        self._handlers[signal.SIGTERM](signal.SIGTERM, None)

    def end(self, exception: SIGTERMException, signals: Sequence[int]) -> None:
        """Save a checkpoint of a training for the restart, and set the exception's exit code; a collective call.

        Args:
            exception: exception that ends Lightning's loops.
            signals: signal that each rank received.
        """
        trainer, number = self._trainer, signal.Signals(max(signals) or signal.SIGTERM)
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            path = self._save()
            where = f" after step {trainer.global_step}"
            if (requeue := _requeue_signal(trainer)) in signals:
                number = signal.Signals(requeue)
                self._handlers[requeue](requeue, None)  # saves a checkpoint for SLURM, too, and requeues the job
        else:
            path, where = None, ""
        self.ended = True
        exception.code = _exit_code(trainer, number)
        rank_zero_info(f"Stopped by {number.name}{where}; {f'checkpoint: {path}' if path else 'nothing was saved'}")

    def _save(self) -> str | None:
        """Write the checkpoint for ``ckpt_path="last"``; return its path, None if all callbacks save only weights."""
        trainer = self._trainer
        if trainer.validating:
            # Mark the validation as run, so that the restarted run does not repeat it.
            trainer.fit_loop.epoch_loop.val_loop.increment_progress_to_evaluation_end()
            trainer.training = True  # Lightning's teardown expects it
        full = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and not c.save_weights_only]
        if not full:
            return None
        callback = next((c for c in full if c.save_last), full[0])
        place = {"epoch": torch.tensor(trainer.current_epoch), "step": torch.tensor(trainer.global_step)}
        path = callback.format_checkpoint_name({**trainer.callback_metrics, **place}, callback.CHECKPOINT_NAME_LAST)
        callback.last_model_path = path
        trainer.save_checkpoint(path, weights_only=False)
        return path


def save_nothing_on_exception(trainer: L.Trainer) -> None:
    """Disable callbacks that save a failed run: they would wait for ranks that do not answer, and hide the error."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, OnExceptionCheckpoint) or getattr(callback, "save_on_exception", False):
            rank_zero_info(f"{type(callback).__name__} saves nothing: the ranks of a failed pipeline do not answer")
            callback.on_exception = lambda *_: None  # type: ignore[method-assign]


def _exit_code(trainer: L.Trainer, signum: int) -> int:
    """Return the exit code for a run that was ended by a signal: 128 + the signal's number, as in shells.

    Processes that Lightning launched return 0. If one returned an error, Lightning's launcher would kill the others.
    The first process must not be killed: its exit code is that of the run, and it may still be writing logs.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    launched = isinstance(environment, LightningEnvironment) and environment.local_rank() > 0
    return 0 if launched else 128 + signum


def _requeue_signal(trainer: L.Trainer) -> Any:
    """Return the signal at which the run's SLURM job is requeued; None if no signal requeues the run."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    return (
        environment.requeue_signal if isinstance(environment, SLURMEnvironment) and environment.auto_requeue else None
    )
