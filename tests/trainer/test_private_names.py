"""Every private name of Lightning that the strategies use: without it they say so, and which."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.callbacks import ModelCheckpoint, ModelSummary
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy, Strategy, launchers
from lightning.pytorch.trainer.connectors.logger_connector import result
from torch.utils.data import SequentialSampler
from torchmetrics import MeanMetric

from lightning_asyncpp.private_names import PrivateNameError
from lightning_asyncpp.strategy_parts.resumable_loader import generators_of
from lightning_asyncpp.trainer import private
from lightning_asyncpp.trainer.checkpoint.epoch_metrics import (
    load_logged_state,
    load_metric_states,
    logged_state,
    metric_states,
)

DDP = DDPStrategy()
SUMMARY = ModelSummary()


def replace_signal_handlers(trainer: L.Trainer) -> None:
    private.replace_signal_handlers(trainer, lambda _: None, lambda: None)


USES: dict[str, tuple[Callable[[L.Trainer], Any], Callable[[L.Trainer], Any]]] = {
    # name: (owner, what needs it)
    "_signal_connector": (lambda t: t, lambda t: private.set_received_sigterm(t)),
    "_broadcast_sigterm_tensor": (
        lambda t: type(t.fit_loop.epoch_loop), private.replace_sigterm_broadcast
    ),
    "_sigterm_notifier_fn": (lambda t: type(t._signal_connector), replace_signal_handlers),
    "_slurm_sigusr_handler_fn": (lambda t: type(t._signal_connector), replace_signal_handlers),
    "register_signal_handlers": (lambda t: type(t._signal_connector), replace_signal_handlers),
    "_has_already_handler": (lambda t: type(t._signal_connector), replace_signal_handlers),
    "optim_progress": (lambda t: t.fit_loop.epoch_loop.automatic_optimization, private.check_names),
    "_register_signal": (lambda t: type(t._signal_connector), replace_signal_handlers),
    "_save_last_checkpoint": (
        lambda t: type(t.checkpoint_callback), lambda t: private.save_last_checkpoint(t, t.checkpoint_callback)
    ),
    "_monitor_candidates": (
        lambda t: type(t.checkpoint_callback), lambda t: private.save_last_checkpoint(t, t.checkpoint_callback)
    ),
    "_checkpoint_connector": (lambda t: t, private.requeue_path),
    "_restarting": (lambda t: t.fit_loop, private.count_epoch_as_whole),
    "update_lr_schedulers": (lambda t: type(t.fit_loop.epoch_loop), lambda t: private.end_batch(t, counted=True)),
    "_should_accumulate": (lambda t: type(t.fit_loop.epoch_loop), lambda t: private.end_batch(t, counted=True)),
    "_batches_that_stepped": (lambda t: t.fit_loop.epoch_loop, private.pass_over_end_of_batch),
    "_should_check_val_fx": (lambda t: type(t.fit_loop.epoch_loop), private.check_names),
    "_data_fetcher": (lambda t: t.fit_loop, private.check_names),
    "_logged_metrics": (lambda t: t._logger_connector, private.check_names),
    "metrics": (lambda t: type(t._logger_connector), private.check_names),
    "val_loop": (lambda t: t.fit_loop.epoch_loop, lambda t: private.run_validations_in(t, nullcontext)),
    "run": (
        lambda t: type(t.fit_loop.epoch_loop.val_loop), lambda t: private.run_validations_in(t, nullcontext)
    ),
    "_val_check_time_interval": (lambda t: t, private.has_timed_validation),
    "_accelerator_connector": (lambda t: t, private.synchronizes_batch_norm),
    "_layer_sync": (lambda t: t._accelerator_connector, private.synchronizes_batch_norm),
    "_compiler_ctx": (lambda t: t.lightning_module, lambda t: private.is_compiled(t.lightning_module)),
    "_every_n_train_steps": (lambda t: t.checkpoint_callback, private.check_names),
    "_last_global_step_saved": (lambda t: t.checkpoint_callback, private.count_step_as_saved),
    "_logger_connector": (lambda t: t, lambda t: private.replace_step_logging(t, lambda: None)),
    "update_train_step_metrics": (
        lambda t: type(t._logger_connector), lambda t: private.replace_step_logging(t, lambda: None)
    ),
    "_results": (lambda t: type(t), private.check_names),
    "_first_loop_iter": (lambda t: t._logger_connector, private.check_names),
    "_data_connector": (lambda t: t, lambda t: private.shuffle_only(t, lambda _: True)),
    "_prepare_dataloader": (
        lambda t: type(t._data_connector), lambda t: private.shuffle_only(t, lambda _: True)
    ),
    "_skip_backward": (lambda t: t.fit_loop.epoch_loop.automatic_optimization, private.check_names),
    "_max_depth": (lambda t: SUMMARY, lambda t: private.summary_depth(SUMMARY)),
    "_start_method": (lambda t: DDP, lambda t: private.start_method(DDP)),
    "_MultiProcessingLauncher": (lambda t: launchers, lambda t: private.multiprocessing_launcher()),
    "get_extra_results": (lambda t: launchers._MultiProcessingLauncher, lambda t: private.multiprocessing_launcher()),
    "update_main_process_results": (
        lambda t: launchers._MultiProcessingLauncher, lambda t: private.multiprocessing_launcher()
    ),
    "_configure_launcher": (lambda t: Strategy, lambda t: private.check_launcher()),
    "_current_fx_name": (lambda t: t.lightning_module, private.check_names),
}  # fmt: skip


AT_AN_EPOCHS_END = ("epoch_end_reached", "on_epoch_end", "update_train_epoch_metrics", "_num_ready_batches_reached")


@pytest.fixture
def trainer(tmp_path: Path) -> L.Trainer:
    """A Trainer that has run, with everything in place."""
    module = BoringModel()
    saving = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1)
    trainer = L.Trainer(
        accelerator="cpu", fast_dev_run=False, max_steps=1, logger=False, callbacks=[saving], log_every_n_steps=1,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(module)
    return trainer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", USES)
def test_a_missing_name_is_named(trainer: L.Trainer, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    owner, use = USES[name]
    use(trainer)  # it is there, and nothing else is missing
    for replaced in (trainer.fit_loop.epoch_loop, trainer._logger_connector, trainer._signal_connector):
        if hasattr(type(replaced), name):  # what the package put there itself
            vars(replaced).pop(name, None)
    holder = owner(trainer)
    monkeypatch.delattr(holder, name, raising=True)
    with pytest.raises(PrivateNameError, match=name):
        use(trainer)


@pytest.mark.parametrize("name", AT_AN_EPOCHS_END)
def test_a_missing_name_at_an_epochs_end_is_named(name: str) -> None:
    parts = {part: lambda *_, **__: True for part in (*AT_AN_EPOCHS_END, "update_lr_schedulers")}
    both = SimpleNamespace(**parts, _batches_that_stepped=1)
    progress = SimpleNamespace(current=SimpleNamespace(completed=1))
    running: Any = SimpleNamespace(
        fit_loop=SimpleNamespace(epoch_loop=both, epoch_progress=progress), _logger_connector=both
    )
    private.end_epoch(running)
    delattr(both, name)
    with pytest.raises(PrivateNameError, match=name):
        private.end_epoch(running)


def test_a_missing_list_of_batches_is_named(trainer: L.Trainer) -> None:
    assert private.batches_ahead(trainer) == 0
    trainer.fit_loop._data_fetcher = SimpleNamespace(batches=[1])  # type: ignore[assignment]
    assert private.batches_ahead(trainer) == 1
    trainer.fit_loop._data_fetcher = SimpleNamespace()  # type: ignore[assignment]
    with pytest.raises(PrivateNameError, match="batches"):
        private.batches_ahead(trainer)


@pytest.mark.parametrize("name", ["_callback_metrics", "_logged_metrics", "_progress_bar_metrics", "_current_fx"])
def test_a_missing_name_of_what_was_logged_is_named(
    trainer: L.Trainer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    logged_state(trainer)
    monkeypatch.delattr(trainer._logger_connector, name)
    with pytest.raises(PrivateNameError, match=name):
        logged_state(trainer)


@pytest.mark.parametrize("name", ["_Metadata", "_Sync", "_ResultMetric"])
def test_a_missing_class_of_metrics_is_named(trainer: L.Trainer, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    trainer.fit_loop.epoch_loop._results.log("on_train_start", "x", torch.tensor(2.0), batch_size=3)
    state = logged_state(trainer)
    load_logged_state(trainer, state, in_epoch=True)
    assert float(trainer.fit_loop.epoch_loop._results["on_train_start.x"].compute()) == 2.0
    monkeypatch.delattr(result, name)
    with pytest.raises(PrivateNameError, match=name):
        load_logged_state(trainer, state, in_epoch=True)


def test_a_missing_count_of_a_metrics_updates_is_named() -> None:
    module = BoringModel()
    module.mean = MeanMetric()
    module.mean.update(torch.tensor(3.0))
    states = metric_states(module)
    other = BoringModel()
    other.mean = MeanMetric()
    load_metric_states(other, states)
    assert float(other.mean.compute()) == 3.0
    del other.mean._update_count
    with pytest.raises(PrivateNameError, match=r"torchmetrics \S+ has no MeanMetric._update_count"):
        load_metric_states(other, states)


def test_every_name_is_tested() -> None:
    source = Path(private.__file__).read_text()
    required = set(re.findall(r', "(\w+)", (?:purpose|")', source))
    assert required == set(USES) | {"batches", *AT_AN_EPOCHS_END}
    assert "getattr(" not in source, "a name that is looked up quietly"


def test_a_missing_name_of_the_trainers_sampler_is_named() -> None:
    wrapper = DistributedSamplerWrapper(SequentialSampler(range(4)), num_replicas=1, rank=0)
    loader: Any = SimpleNamespace(sampler=wrapper)
    assert generators_of(loader) == []
    del wrapper.dataset._sampler  # type: ignore[attr-defined]
    with pytest.raises(PrivateNameError, match="_sampler"):
        generators_of(loader)
