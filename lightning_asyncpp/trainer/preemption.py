"""A run that is told to end by a signal: what is saved, its exit code, and whether SLURM starts it again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
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
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn


class Preemption:
    """Receives SIGTERM and SIGUSR1, and ends a run that all ranks agreed to end.

    A handler only takes a note, at whatever point the process is; what follows is done between two batches.

    Args:
        trainer: whose run it is.
        on_signal: called in the handler.

    Attributes:
        received: the first signal that this process got; 0 if none.
        ended: the run was ended here, with everything saved.
    """

    def __init__(self, trainer: L.Trainer, on_signal: Callable[[], None]) -> None:
        self.received = 0
        self.ended = False
        self._trainer, self._on_signal = trainer, on_signal
        self._requeue = False

    def install(self) -> None:
        """Receive signals from here on; Lightning puts the earlier handlers back when the run ends.

        Its own broadcast, or save a checkpoint, at whatever point each rank is. A handler of the user's for SIGUSR1
        stays.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        free = signal.getsignal(signal.SIGUSR1) in (signal.SIG_DFL, signal.SIG_IGN)
        for number in {signal.SIGTERM, requeue_signal(self._trainer), signal.SIGUSR1 if free else None} - {None}:
            signal.signal(number, lambda received, _: self.receive(received))  # type: ignore[arg-type]

    def receive(self, signum: int) -> None:
        """Take a note of a signal; those after the first change nothing."""
        self.received = self.received or signum
        self._on_signal()

    def end(self, exception: SIGTERMException, signals: Sequence[int]) -> None:
        """Save what a restart goes on from, say so, and give the exception its exit code; a collective call.

        Args:
            exception: that ends the run, out of Lightning's loops.
            signals: what each rank received.
        """
        requeue = requeue_signal(self._trainer)
        self._requeue = requeue is not None and requeue in signals
        number = signal.Signals(requeue if self._requeue and requeue else max(signals) or signal.SIGTERM)
        where = f"after step {self._trainer.global_step}" if self._is_training else f"in {self._stage}"
        path = self._save() if self._is_training else None
        self.ended = True
        exception.code = exit_code(self._trainer, number)
        rank_zero_info(f"Stopped by {number.name} {where}; {f'checkpoint: {path}' if path else 'nothing was saved'}")

    def requeue(self) -> None:
        """Let SLURM start the job again, if that was asked for; call it when all ranks are done."""
        if self._requeue and self._trainer.is_global_zero:
            requeue_job()
        self._requeue = False

    @property
    def _is_training(self) -> bool:
        return self._trainer.state.fn == TrainerFn.FITTING and not self._trainer.sanity_checking

    @property
    def _stage(self) -> str:
        function = self._trainer.state.fn
        return "the sanity check" if self._trainer.sanity_checking or function is None else f"trainer.{function.value}"

    def _save(self) -> str | None:
        trainer = self._trainer
        if trainer.validating:
            trainer.fit_loop.epoch_loop.val_loop.increment_progress_to_evaluation_end()  # it is not run again
            trainer.training = True  # for what Lightning tears down
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return None
        path = save_last(trainer)
        if self._requeue:
            path = str(trainer.strategy.broadcast(requeue_path(trainer)))
            trainer.save_checkpoint(path)
        return path


def save_last(trainer: L.Trainer) -> str | None:
    """Write the checkpoint that ``ckpt_path="last"`` finds; a collective call.

    Returns:
        Its path; None if no callback says where.
    """
    full = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and not c.save_weights_only]
    keeping = [callback for callback in full if callback.save_last]
    on_exception = [c for c in trainer.checkpoint_callbacks if isinstance(c, OnExceptionCheckpoint)]
    if on_exception and not keeping:
        return on_exception[0].ckpt_path  # which it writes itself, after this
    for callback in keeping or full:
        return _save_last_of(trainer, callback)
    return None


def _save_last_of(trainer: L.Trainer, callback: ModelCheckpoint) -> str:
    """Write a callback's ``last.ckpt``, whether it keeps one or not, and return its path."""
    place = {"epoch": torch.tensor(trainer.current_epoch), "step": torch.tensor(trainer.global_step)}
    path = callback.format_checkpoint_name({**trainer.callback_metrics, **place}, callback.CHECKPOINT_NAME_LAST)
    callback.last_model_path = path
    trainer.save_checkpoint(path)
    return path


def requeue_path(trainer: L.Trainer) -> str:
    """Where Lightning looks for the checkpoint of a SLURM job that was requeued: the number after the largest."""
    folder = trainer.default_root_dir
    names = os.listdir(folder) if os.path.isdir(folder) else []
    numbers = [int(found[1]) for name in names if (found := re.search(r"ckpt_(\d+)", name))]
    return os.path.join(folder, f"hpc_ckpt_{max(numbers, default=0) + 1}.ckpt")


def save_nothing_on_exception(trainer: L.Trainer) -> None:
    """Keep callbacks from saving a run that failed: they would wait for ranks that do not answer, and hide why."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, OnExceptionCheckpoint) or getattr(callback, "save_on_exception", False):
            rank_zero_info(f"{type(callback).__name__} saves nothing: the ranks of a failed pipeline do not answer")
            callback.on_exception = _do_nothing  # type: ignore[method-assign, assignment]


def save_on_exception_again(trainer: L.Trainer) -> None:
    """Undo :func:`save_nothing_on_exception` for another run."""
    for callback in trainer.checkpoint_callbacks:
        if vars(callback).get("on_exception") is _do_nothing:
            del callback.on_exception


def exit_code(trainer: L.Trainer, signum: int) -> int:
    """What a process ends with whose run a signal ended: 128 + its number, as shells have it.

    Lightning's launcher kills what still runs once a process that it launched ends with an error, although the first
    one, whose code is the run's, may still be writing logs: those end with 0.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    launched = isinstance(environment, LightningEnvironment) and environment.local_rank() > 0
    return 0 if launched else 128 + signum


def requeue_signal(trainer: L.Trainer) -> int | None:
    """The signal upon which the job is to be requeued; None if it is not, or this is no SLURM job."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        return environment.requeue_signal
    return None


def requeue_job() -> None:
    """Put this job into the queue again (``scontrol requeue``); call it on one rank, when everything is saved.

    What goes wrong is a warning: the checkpoint is there.
    """
    job = os.environ.get("SLURM_JOB_ID", "")
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        job = f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID', '')}"
    if not re.fullmatch(r"[0-9]+(_[0-9]+)?", job):
        rank_zero_warn(f"the job is not requeued: SLURM_JOB_ID={job!r} is no number of a job")
        return
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
    except OSError as error:
        rank_zero_warn(f"job {job} is not requeued: scontrol cannot be run ({error})")
        return
    if done.returncode:
        rank_zero_warn(f"job {job} is not requeued: scontrol ended with {done.returncode}: {done.stderr.strip()}")
    else:
        rank_zero_info(f"Requeued job {job}")


def _do_nothing(*_: Any) -> None:
    """What is called on an exception."""
