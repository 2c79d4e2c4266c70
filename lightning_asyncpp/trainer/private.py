"""The private names of Lightning that the strategies need, each behind one function that fails loudly without it.

Lightning has no public way to replace what it does about signals, to ask whether validation is due, or to log a
metric with the step that it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.trainer.states import RunningStage

from lightning_asyncpp.private_names import required


def drop_sigterm_broadcast(trainer: Trainer) -> None:
    """Drop the blocking broadcast before every training batch."""
    loop = trainer.fit_loop.epoch_loop
    required(loop, "_broadcast_sigterm_tensor", "agree on SIGTERM without a broadcast in every batch")
    loop.__dict__["_broadcast_sigterm_tensor"] = lambda: None


def validation_is_due(trainer: Trainer) -> bool:
    """Whether the training loop validates after the current batch."""
    return bool(trainer.fit_loop.epoch_loop._should_check_val_fx(trainer.fit_loop._data_fetcher))  # type: ignore[arg-type]


def run_validations_in(trainer: Trainer, context: Callable[[], AbstractContextManager[None]]) -> None:
    """Run the validations of a training in a context, from before their loaders are iterated; not the sanity check.

    That leaves no trace by itself: Lightning puts the generators back after it. A resumed run iterates over the loaders
    of a validation that it then leaves out.
    """
    purpose = "keep the random numbers of validations apart from those of the training"
    loop = required(trainer.fit_loop.epoch_loop, "val_loop", purpose)

    def run_in_context(run: Callable[[Any], Any]) -> Any:
        with nullcontext() if trainer.sanity_checking else context():
            return run(loop)

    for name in ("run", "increment_progress_to_evaluation_end"):
        setattr(loop, name, partial(run_in_context, required(type(loop), name, purpose)))


def checkpoint_is_due(callback: Checkpoint, global_step: int) -> bool:
    """Whether a checkpoint callback saves after the current batch, as far as its step interval says."""
    every = callback._every_n_train_steps if isinstance(callback, ModelCheckpoint) else 0
    return every > 0 and global_step % every == 0


def replace_step_logging(trainer: Trainer, at_end_of_batch: Callable[[], None]) -> None:
    """Log no step metrics at the end of a batch, but call ``at_end_of_batch``; see :func:`log_step_metrics`."""
    purpose = "log metrics with the step that they belong to"
    connector = required(trainer, "_logger_connector", purpose)
    required(connector, "update_train_step_metrics", purpose)
    connector.update_train_step_metrics = at_end_of_batch


def log_step_metrics(trainer: Trainer, batches_ago: int) -> None:
    """Send the step metrics to the loggers as those of the batch ``batches_ago`` batches before the current one."""
    step = trainer.fit_loop.epoch_loop._batches_that_stepped - batches_ago
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    due = every > 0 and (step + 1) % every == 0
    if due or trainer.should_stop:
        metrics = dict(trainer._logger_connector.metrics["log"])
        if metrics:
            _log_with_epoch(trainer, metrics, step)


def log_at_step(trainer: Trainer, metrics: dict[str, float], batches_ago: int) -> None:
    """Send values to the loggers as those of a batch, at the end of an epoch, where Lightning logs those of epochs."""
    purpose = "log metrics with the step that they belong to"
    step = required(trainer.fit_loop.epoch_loop, "_batches_that_stepped", purpose) - 1 - batches_ago
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    if metrics and every > 0 and (step + 1) % every == 0:
        rounded = {name: torch.tensor(value, dtype=torch.float32).item() for name, value in metrics.items()}
        _log_with_epoch(trainer, rounded, step)


def _log_with_epoch(trainer: Trainer, metrics: dict[str, Any], step: int) -> None:
    """Send values to the loggers, with the epoch."""
    trainer._logger_connector.log_metrics({"epoch": trainer.current_epoch, **metrics}, step=step)  # type: ignore[dict-item]


@contextmanager
def running_hook(module: LightningModule, name: str) -> Iterator[None]:
    """Let ``module.log`` take what runs meanwhile for the hook ``name``."""
    before = current_hook(module)
    module._current_fx_name = name
    try:
        yield
    finally:
        module._current_fx_name = before


def current_hook(module: LightningModule) -> str | None:
    """Name of the hook that Lightning is running."""
    return module._current_fx_name


class AtUpdate(NamedTuple):
    """What Lightning reads when an update is applied, as it was when its batch was run.

    Attributes:
        global_step: hooks decide by it.
        clip_val, clip_algorithm: how the gradient is clipped.
    """

    global_step: int
    clip_val: float | None
    clip_algorithm: Any


def state_at_update(module: LightningModule) -> AtUpdate:
    """What the update of the batch that has just run is to find."""
    trainer = module.trainer
    return AtUpdate(trainer.global_step, trainer.gradient_clip_val, trainer.gradient_clip_algorithm)


@contextmanager
def at_update(trainer: Trainer, state: AtUpdate) -> Iterator[None]:
    """Let the trainer be meanwhile as it was when the batch was run whose update comes late."""
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    counts = loop.optim_progress.optimizer.step.total
    present = counts.completed, trainer.gradient_clip_val, trainer.gradient_clip_algorithm
    counts.completed, trainer.gradient_clip_val, trainer.gradient_clip_algorithm = state
    try:
        yield
    finally:
        counts.completed, trainer.gradient_clip_val, trainer.gradient_clip_algorithm = present


def update_logged(trainer: Trainer, hook: str, name: str, value: float, weight: float) -> bool:
    """Add a value to a metric that ``hook`` has logged before in this epoch; returns whether there was one.

    ``LightningModule.log`` examines its arguments and moves the metric to its device every time, which takes longer
    than anything else that a pipeline does around a batch.
    """
    results = trainer._results
    if results is None or trainer._logger_connector._first_loop_iter:
        return False
    metric = results.get(f"{hook}.{name}")
    if metric is None or metric.has_reset:
        return False
    results.update_metrics(f"{hook}.{name}", torch.tensor(value, dtype=torch.float32), weight)
    return True


def shuffle_only(trainer: Trainer, shuffles: Callable[[object], bool]) -> None:
    """Shuffle those training loaders alone of which ``shuffles`` says so: Lightning's sampler shuffles them all."""
    purpose = "read a loader that does not shuffle in its own order"
    connector = required(trainer, "_data_connector", purpose)
    prepare = required(type(connector), "_prepare_dataloader", purpose)

    def prepared(dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        kept = mode is RunningStage.TRAINING and not shuffles(dataloader)
        return prepare(connector, dataloader, shuffle and not kept, mode)

    connector._prepare_dataloader = prepared


def begins_accumulation(trainer: Trainer) -> bool:
    """Whether the gradients before the current batch are zeroed in it; as Lightning's closure decides."""
    return trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0


def batches_ahead(trainer: Trainer) -> int:
    """How many batches of training were read that have not been trained on."""
    purpose = "know where the training data is"
    fetcher = required(trainer.fit_loop, "_data_fetcher", purpose)
    progress = trainer.fit_loop.epoch_loop.batch_progress.state_dict()["current"]
    waiting = [] if fetcher is None else required(fetcher, "batches", purpose)  # none after the training
    return len(waiting) + int(progress["ready"]) - int(progress["processed"])
