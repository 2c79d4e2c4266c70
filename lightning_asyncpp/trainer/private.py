"""The private names of Lightning that the strategies need, each behind one function that fails loudly without it.

Lightning has no public way to replace what it does about signals, to ask whether validation is due, or to log a
metric with the step that it belongs to.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, ModelSummary
from lightning.pytorch.strategies import DDPStrategy, Strategy, launchers
from lightning.pytorch.trainer.states import RunningStage

from lightning_asyncpp.private_names import required


def check_names(trainer: Trainer) -> None:
    """Make sure of the names that functions here use in every batch, where they take them as given."""
    purpose = "follow the batches of a training"
    connector, epoch_loop = required(trainer, "_logger_connector", purpose), trainer.fit_loop.epoch_loop
    required(trainer.fit_loop, "_data_fetcher", purpose)
    required(epoch_loop, "_should_check_val_fx", purpose)
    required(epoch_loop, "_batches_that_stepped", purpose)
    required(epoch_loop.automatic_optimization, "_skip_backward", purpose)
    required(epoch_loop.automatic_optimization, "optim_progress", purpose)
    required(trainer.lightning_module, "_current_fx_name", purpose)
    required(type(trainer), "_results", purpose)
    required(type(connector), "metrics", purpose)
    required(connector, "_logged_metrics", purpose)
    required(connector, "_first_loop_iter", purpose)
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            required(callback, "_every_n_train_steps", "drain the pipeline before a checkpoint")


def replace_sigterm_broadcast(trainer: Trainer, function: Callable[[], None] = lambda: None) -> None:
    """Drop the blocking broadcast before every training batch; ``function`` takes its place."""
    loop = trainer.fit_loop.epoch_loop
    required(loop, "_broadcast_sigterm_tensor", "agree on SIGTERM without a broadcast in every batch")
    loop.__dict__["_broadcast_sigterm_tensor"] = function


def replace_signal_handlers(trainer: Trainer, on_signal: Callable[[int], None], next_: Callable[[], None]) -> None:
    """Handle SIGTERM, SIGUSR1 and SLURM's requeue signal by ``on_signal`` alone, from where Lightning begins to.

    Lightning's own handlers broadcast, or save a checkpoint, at whatever point each rank is. A handler of the user's
    for SIGUSR1 stays, and one for SIGTERM is called, too. Lightning puts the earlier handlers back when the run ends.

    Args:
        trainer: whose handlers they are.
        on_signal: called in the handler with the signal's number.
        next_: called when the handlers are in place, which is after checkpoints were restored and before any loop runs.
    """
    purpose = "end a run on a signal"
    connector = required(trainer, "_signal_connector", purpose)
    register = required(type(connector), "register_signal_handlers", purpose)
    has_handler = required(connector, "_has_already_handler", purpose)
    set_handler = required(connector, "_register_signal", purpose)
    required(connector, "_sigterm_notifier_fn", purpose)
    required(connector, "_slurm_sigusr_handler_fn", purpose)

    def notify(signum: int, _: Any) -> None:
        on_signal(signum)

    def register_all() -> None:
        register(connector)
        if not has_handler(signal.SIGUSR1):
            set_handler(signal.SIGUSR1, notify)
        next_()

    connector._sigterm_notifier_fn = connector._slurm_sigusr_handler_fn = notify
    connector.register_signal_handlers = register_all


def save_last_checkpoint(trainer: Trainer, callback: ModelCheckpoint) -> str:
    """Write the callback's ``last.ckpt``, whether it keeps one or not, and return its path; a collective call."""
    purpose = "save a checkpoint before the process ends"
    save = required(callback, "_save_last_checkpoint", purpose)
    candidates = required(callback, "_monitor_candidates", purpose)(trainer)
    kept, callback.save_last = callback.save_last, True
    if kept == "link" and trainer.is_global_zero and os.path.islink(callback.last_model_path):
        os.remove(callback.last_model_path)  # else the file that it points to would be overwritten
    try:
        save(trainer, candidates)
    finally:
        callback.save_last = kept
    return callback.last_model_path


def requeue_path(trainer: Trainer) -> str:
    """Where Lightning looks for the checkpoint of a SLURM job that was requeued."""
    connector = required(trainer, "_checkpoint_connector", "save a checkpoint before a requeue")
    return str(connector.hpc_save_path(trainer.default_root_dir))


def set_received_sigterm(trainer: Trainer) -> None:
    """Let Lightning end the run after this batch; every rank calls it at the same batch."""
    required(trainer, "_signal_connector", "end a run on SIGTERM").received_sigterm = True


def count_epoch_as_whole(trainer: Trainer) -> None:
    """Have Lightning end the epoch in which a run was resumed as any other."""
    required(trainer.fit_loop, "_restarting", "let schedulers step at the end of a resumed epoch")
    trainer.fit_loop._restarting = False


def end_batch(trainer: Trainer, counted: bool) -> None:
    """Do what Lightning does after a batch and whatever validation follows it.

    Args:
        trainer: about to go on after a batch.
        counted: count the batch, too, where Lightning would not.
    """
    loop = trainer.fit_loop.epoch_loop
    purpose = "end a batch after which a run was resumed"
    accumulates = required(loop, "_should_accumulate", purpose)
    required(loop, "_batches_that_stepped", purpose)
    required(loop, "update_lr_schedulers", purpose)("step", update_plateau_schedulers=True)
    if counted and not accumulates():
        loop._batches_that_stepped += 1


def pass_over_end_of_batch(trainer: Trainer) -> None:
    """Do nothing where Lightning ends the batch once more after whose validation a run is resumed; it counts it, too.

    It takes all checkpoints from then for such that the validation wrote.
    """
    loop = trainer.fit_loop.epoch_loop
    purpose = "go on after the last validation of another run"
    required(loop, "update_lr_schedulers", purpose)
    required(loop, "_batches_that_stepped", purpose)

    def update_nothing(*_: Any, **__: Any) -> None:
        del loop.update_lr_schedulers  # the next time it is Lightning's own again
        loop._batches_that_stepped -= 1

    loop.update_lr_schedulers = update_nothing  # type: ignore[method-assign]


def end_epoch(trainer: Trainer) -> None:
    """Do what Lightning does at an epoch's end after all hooks: schedulers decide on its metrics, which are logged.

    Args:
        trainer: about to begin with the epoch after it.
    """
    purpose = "end an epoch at whose end a run was resumed"
    loop, epochs = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_progress.current
    connector = required(trainer, "_logger_connector", purpose)
    required(connector, "epoch_end_reached", purpose)()
    required(connector, "on_epoch_end", purpose)()
    was_whole = required(loop, "_num_ready_batches_reached", purpose)()
    required(loop, "_batches_that_stepped", purpose)
    log = required(connector, "update_train_epoch_metrics", purpose)
    epochs.completed -= 1  # what follows belongs to that epoch and its last step
    if was_whole:
        required(loop, "update_lr_schedulers", purpose)("epoch", update_plateau_schedulers=True)
    loop._batches_that_stepped -= 1
    log()
    loop._batches_that_stepped += 1
    epochs.completed += 1


def validation_is_due(trainer: Trainer) -> bool:
    """Whether the training loop validates after the current batch."""
    return bool(trainer.fit_loop.epoch_loop._should_check_val_fx(trainer.fit_loop._data_fetcher))  # type: ignore[arg-type]


def run_validations_in(trainer: Trainer, context: Callable[[], AbstractContextManager[None]]) -> None:
    """Run the validations of a training in a context, from before their loaders are iterated; not the sanity check.

    That leaves no trace by itself: Lightning puts the generators back after it.
    """
    purpose = "keep the random numbers of validations apart from those of the training"
    loop = required(trainer.fit_loop.epoch_loop, "val_loop", purpose)
    run = required(type(loop), "run", purpose)

    def run_in_context() -> Any:
        with nullcontext() if trainer.sanity_checking else context():
            return run(loop)

    loop.run = run_in_context


def has_timed_validation(trainer: Trainer) -> bool:
    """Whether ``val_check_interval`` is a time: every rank would decide by its own clock."""
    return required(trainer, "_val_check_time_interval", "refuse a validation that is due by time") is not None


def synchronizes_batch_norm(trainer: Trainer) -> bool:
    """Whether the Trainer is to turn BatchNorm into one that synchronises its statistics over all ranks."""
    purpose = "refuse sync_batchnorm=True"
    connector = required(trainer, "_accelerator_connector", purpose)
    return required(connector, "_layer_sync", purpose) is not None


def is_compiled(module: LightningModule) -> bool:
    """Whether the module itself went through ``torch.compile``."""
    return required(module, "_compiler_ctx", "refuse a compiled LightningModule") is not None


def checkpoint_is_due(callback: Checkpoint, global_step: int) -> bool:
    """Whether a checkpoint callback saves after the current batch, as far as its step interval says."""
    every = callback._every_n_train_steps if isinstance(callback, ModelCheckpoint) else 0
    return every > 0 and global_step % every == 0


def count_step_as_saved(trainer: Trainer) -> None:
    """Let no checkpoint callback of a resumed run save the step again that it resumes from.

    Lightning would do so after a batch without an update, and replace the checkpoint of an update's end by one in the
    middle of an accumulation.
    """
    for callback in trainer.checkpoint_callbacks:
        if checkpoint_is_due(callback, trainer.global_step):
            required(callback, "_last_global_step_saved", "keep the checkpoint that a run resumes from")
            callback._last_global_step_saved = trainer.global_step  # type: ignore[attr-defined]


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
    """Send values to the loggers, with the epoch; ``trainer.logged_metrics`` has it only if somebody logs it."""
    connector = trainer._logger_connector
    logged: dict[str, Any] = connector._logged_metrics
    before = {name: logged[name] for name in ("epoch",) if name in logged}
    connector.log_metrics({**metrics, "epoch": metrics.get("epoch", trainer.current_epoch)}, step=step)
    if "epoch" not in metrics:
        logged.pop("epoch", None)
        logged.update(before)


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


def skips_backward(trainer: Trainer) -> bool:
    """Whether the training loop runs forwards only, as StochasticWeightAveraging has it in its extra epoch."""
    return trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward


def begins_accumulation(trainer: Trainer) -> bool:
    """Whether the gradients before the current batch are zeroed in it; as Lightning's closure decides."""
    return not skips_backward(trainer) and trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0


def batches_ahead(trainer: Trainer) -> int:
    """How many batches of training were read that have not been trained on."""
    purpose = "know where the training data is"
    fetcher = required(trainer.fit_loop, "_data_fetcher", purpose)
    progress = trainer.fit_loop.epoch_loop.batch_progress.state_dict()["current"]
    waiting = [] if fetcher is None else required(fetcher, "batches", purpose)  # none after the training
    return len(waiting) + int(progress["ready"]) - int(progress["processed"])


def summary_depth(callback: ModelSummary) -> int:
    """Down to which depth a model summary shows modules."""
    return int(required(callback, "_max_depth", "show all stages in the place of the default summary"))


def start_method(strategy: DDPStrategy) -> str:
    """How a strategy starts its processes."""
    return str(required(strategy, "_start_method", "give the trained model to the process that starts others"))


def multiprocessing_launcher() -> Any:
    """Lightning's launcher of forked and spawned processes, to derive one from."""
    purpose = "give the trained model to the process that starts others"
    launcher = required(launchers, "_MultiProcessingLauncher", purpose)
    required(launcher, "get_extra_results", purpose)
    required(launcher, "update_main_process_results", purpose)
    return launcher


def check_launcher() -> None:
    """Make sure that Lightning asks its strategies for their launcher as it did."""
    required(Strategy, "_configure_launcher", "give the trained model to the process that starts others")
