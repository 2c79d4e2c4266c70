"""Functions that use private names of Lightning, and raise an error if such a name is gone.

Lightning has no public way to replace its signal handling, to ask whether validation is due, or to send the metrics of
one rank to all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor

from lightning_asyncpp.dependencies import required


def drop_sigterm_broadcast(trainer: Trainer) -> None:
    """Remove Lightning's blocking broadcast before every training batch."""
    loop = trainer.fit_loop.epoch_loop
    required(loop, "_broadcast_sigterm_tensor", "agree on SIGTERM without a broadcast in every batch")
    loop.__dict__["_broadcast_sigterm_tensor"] = lambda: None


def validation_is_due(trainer: Trainer) -> bool:
    """Return whether the training loop validates after the current batch."""
    return bool(trainer.fit_loop.epoch_loop._should_check_val_fx(trainer.fit_loop._data_fetcher))  # type: ignore[arg-type]


def run_validations_in(trainer: Trainer, context: Callable[[], AbstractContextManager[None]]) -> None:
    """Run the validations of a training in a context that is entered before their loaders are iterated.

    The sanity check needs no context, since Lightning restores the generators after it. A resumed run may skip a
    validation, but another method then iterates over the validation's loaders. That method is in the context, too.
    """
    purpose = "separate the random numbers of validations from those of the training"
    loop = required(trainer.fit_loop.epoch_loop, "val_loop", purpose)

    def run_in_context(run: Callable[[Any], Any]) -> Any:
        with nullcontext() if trainer.sanity_checking else context():
            return run(loop)

    for name in ("run", "increment_progress_to_evaluation_end"):
        setattr(loop, name, partial(run_in_context, required(type(loop), name, purpose)))


def checkpoint_is_due(callback: Checkpoint, global_step: int) -> bool:
    """Return whether a checkpoint callback saves after the current batch by its step interval."""
    every = callback._every_n_train_steps if isinstance(callback, ModelCheckpoint) else 0
    return every > 0 and global_step % every == 0


def saves_by_time(callback: Checkpoint) -> bool:
    """Return whether a checkpoint callback may save after any batch, by rank 0's clock."""
    return isinstance(callback, ModelCheckpoint) and callback._train_time_interval is not None


def before_step_logging(trainer: Trainer, function: Callable[[], None]) -> None:
    """Call a function after ``on_train_batch_end`` of all callbacks, before Lightning logs the batch's values."""
    purpose = "hold back a stop until all ranks know of it"
    connector = required(trainer, "_logger_connector", purpose)
    log = required(type(connector), "update_train_step_metrics", purpose)

    def log_afterwards() -> None:
        function()
        log(connector)

    connector.update_train_step_metrics = log_afterwards


def at_end_of_epoch(trainer: Trainer, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call functions after the last batch of an epoch or of an evaluation's loader, before any hook at that end.

    Args:
        trainer: trainer that runs the loop.
        before: function called while Lightning still has the values of steps.
        after: function called when Lightning has the values of the epoch.
    """
    purpose = "combine what replicas logged in an epoch"
    connector = required(trainer, "_logger_connector", purpose)
    end = required(type(connector), "epoch_end_reached", purpose)

    def end_once() -> None:
        if connector._first_loop_iter is None:  # an evaluation whose last loader has ended already
            return
        before()
        end(connector)
        after()

    connector.epoch_end_reached = end_once


class EpochValue(NamedTuple):
    """Value that the last stage of a replica has logged for an epoch.

    Attributes:
        key: key of the value in Lightning's results.
        options: options of the call of ``self.log``.
        value: value so far; for a mean, the weighted sum.
        weight: sum of the weights of a mean; 1 for other reductions; None for a torchmetrics object, whose value
            already covers all replicas.
    """

    key: str
    options: dict[str, Any]
    value: Tensor
    weight: Any


def epoch_values(trainer: Trainer, hook: str) -> list[EpochValue]:
    """Return this rank's values for the epoch, logged in hooks whose names begin with ``hook``."""
    results, rows = trainer._results, []
    assert results is not None
    for key, metric in sorted(results.valid_items()):  # computing torchmetrics is collective, so the order matters
        meta = metric.meta
        if not meta.on_epoch or not meta.fx.startswith(hook):
            continue
        names = ("name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")
        options = {name: getattr(meta, name) for name in names} | {"reduce_fx": meta.reduce_fx.__name__}
        options["fx"] = meta.fx.partition(".")[0]
        value: Any = metric.value if metric.is_tensor else results._get_cache(metric, on_step=False)
        weight = getattr(metric, "cumulated_batch_size", 1) if metric.is_tensor else None
        # Values go to the host, since other ranks have other devices.
        weight = weight.cpu() if isinstance(weight, Tensor) else weight
        rows.append(EpochValue(key, options, value.cpu(), weight))
    return rows


def set_epoch_value(trainer: Trainer, row: EpochValue, value: Tensor) -> None:
    """Set Lightning's value of the epoch, on a rank that may not have logged it."""
    results = trainer._results
    assert results is not None
    if row.key not in results:
        results.log(**row.options, value=value, batch_size=1, sync_dist_fn=trainer.strategy.reduce)  # as self.log does
    results[row.key]._computed, results[row.key].has_reset = value, False


def set_step_values(trainer: Trainer, values: Mapping[str, Tensor]) -> None:
    """Replace Lightning's newest values of steps on this rank."""
    if trainer.training:
        for metric in (trainer._results or {}).values():
            if metric.meta.on_step:
                metric._forward_cache = values.get(metric.meta.forked_name(on_step=True))


@contextmanager
def running_hook(module: LightningModule, name: str) -> Iterator[None]:
    """Run a ``with`` block in which ``module.log`` uses the rules of the hook ``name``."""
    before = module._current_fx_name
    module._current_fx_name = name
    try:
        yield
    finally:
        module._current_fx_name = before


def state_at_update(module: LightningModule) -> tuple[int, float | None, Any]:
    """Return the Trainer's step count, clip value and clip algorithm for the update of the batch that has just run."""
    trainer = module.trainer
    return trainer.global_step, trainer.gradient_clip_val, trainer.gradient_clip_algorithm


@contextmanager
def at_update(trainer: Trainer, state: tuple[int, float | None, Any]) -> Iterator[None]:
    """Give the trainer, and so hooks, the state of an earlier batch while the update of that batch is applied."""
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    counts = loop.optim_progress.optimizer.step.total
    present = counts.completed, trainer.gradient_clip_val, trainer.gradient_clip_algorithm
    counts.completed, trainer.gradient_clip_val, trainer.gradient_clip_algorithm = state
    try:
        yield
    finally:
        counts.completed, trainer.gradient_clip_val, trainer.gradient_clip_algorithm = present


def shuffle_only(trainer: Trainer, shuffles: Callable[[object], bool]) -> None:
    """Shuffle only the training loaders for which ``shuffles`` is true; Lightning's sampler would shuffle all."""
    purpose = "keep the order of a training loader that does not shuffle"
    connector = required(trainer, "_data_connector", purpose)
    prepare = required(type(connector), "_prepare_dataloader", purpose)

    def prepared(dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        kept = mode is RunningStage.TRAINING and not shuffles(dataloader)
        return prepare(connector, dataloader, shuffle and not kept, mode)

    connector._prepare_dataloader = prepared


def begins_accumulation(trainer: Trainer) -> bool:
    """Return whether the current batch begins a new accumulation, by the rule of Lightning's closure."""
    return trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0


def read_again(trainer: Trainer) -> None:
    """Start a new iteration over the training loaders."""
    iter(required(trainer.fit_loop, "_data_fetcher", "resume training data from a checkpoint"))


def batches_ahead(trainer: Trainer) -> int:
    """Return the number of training batches that were read but not trained on."""
    purpose = "know the position in the training data"
    fetcher = required(trainer.fit_loop, "_data_fetcher", purpose)
    progress = trainer.fit_loop.epoch_loop.batch_progress.state_dict()["current"]
    waiting = [] if fetcher is None else required(fetcher, "batches", purpose)  # no fetcher after the training
    return len(waiting) + int(progress["ready"]) - int(progress["processed"])
