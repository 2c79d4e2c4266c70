"""A run that is told to end by a signal: what is saved, and its exit code."""

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
    """Takes over Lightning's handlers of signals, and ends a run that all ranks agreed to end.

    At the signal only a note is taken, at whatever point the process is. Lightning's handlers, which send to other
    ranks or save, are called when all ranks are between the same two batches.

    Args:
        trainer: whose run it is.
        on_signal: called at a signal.

    Attributes:
        received: the first signal that this process got; 0 if none.
        ended: the run was ended here, with everything saved.
    """

    def __init__(self, trainer: L.Trainer, on_signal: Callable[[], None]) -> None:
        self.received = 0
        self.ended = False
        self._trainer, self._on_signal = trainer, on_signal
        self._handlers: dict[int, Any] = {}  # Lightning's

    def install(self) -> None:
        """Receive signals from here on; Lightning puts the handlers back that there were before the run."""
        for number in {signal.SIGTERM, _requeue_signal(self._trainer) or signal.SIGTERM}:
            handlers = getattr(signal.getsignal(number), "signal_handlers", None)  # Lightning's, and then the user's
            if handlers and threading.current_thread() is threading.main_thread():
                self._handlers[number] = handlers[0]
                signal.signal(number, lambda received, _: self.receive(received))

    def receive(self, signum: int) -> None:
        """Take a note of a signal; those after the first change nothing."""
        self.received = self.received or signum
        self._on_signal()

    def stop(self) -> None:
        """Have Lightning end the run after this batch, or after its epoch; every rank calls it after the same batch."""
        self._handlers[signal.SIGTERM](signal.SIGTERM, None)

    def end(self, exception: SIGTERMException, signals: Sequence[int]) -> None:
        """Save what a restart goes on from, say so, and give the exception its exit code; a collective call.

        Args:
            exception: that ends the run, out of Lightning's loops.
            signals: what each rank received.
        """
        trainer, number = self._trainer, signal.Signals(max(signals) or signal.SIGTERM)
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            path = self._save()
            where = f" after step {trainer.global_step}"
            if (requeue := _requeue_signal(trainer)) in signals:
                number = signal.Signals(requeue)
                self._handlers[requeue](requeue, None)  # it saves for SLURM, too, and has the job start again
        else:
            path, where = None, ""
        self.ended = True
        exception.code = _exit_code(trainer, number)
        rank_zero_info(f"Stopped by {number.name}{where}; {f'checkpoint: {path}' if path else 'nothing was saved'}")

    def _save(self) -> str | None:
        """Write the checkpoint that ``ckpt_path="last"`` finds, and return its path; None if no callback says where."""
        trainer = self._trainer
        if trainer.validating:
            trainer.fit_loop.epoch_loop.val_loop.increment_progress_to_evaluation_end()  # it is not run again
            trainer.training = True  # for what Lightning tears down
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
    """Keep callbacks from saving a run that failed: they would wait for ranks that do not answer, and hide why."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, OnExceptionCheckpoint) or getattr(callback, "save_on_exception", False):
            rank_zero_info(f"{type(callback).__name__} saves nothing: the ranks of a failed pipeline do not answer")
            callback.on_exception = _do_nothing  # type: ignore[method-assign, assignment]


def _exit_code(trainer: L.Trainer, signum: int) -> int:
    """What a process ends with whose run a signal ended: 128 + its number, as shells have it.

    Lightning's launcher kills what still runs once a process that it launched ends with an error, although the first
    one, whose code is the run's, may still be writing logs: those end with 0.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    launched = isinstance(environment, LightningEnvironment) and environment.local_rank() > 0
    return 0 if launched else 128 + signum


def _requeue_signal(trainer: L.Trainer) -> Any:
    """The signal upon which SLURM is to start the job again; None if it is not, or this is no SLURM job."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    return (
        environment.requeue_signal if isinstance(environment, SLURMEnvironment) and environment.auto_requeue else None
    )


def _do_nothing(*_: Any) -> None:
    """What is called on an exception."""
