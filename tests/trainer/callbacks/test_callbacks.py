"""Every callback that Lightning exports works or is refused with a reason, and their page is up to date."""

from __future__ import annotations

import contextlib
import functools
import io
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch import callbacks

from tests.helpers.modules import BackboneNet, BatchNormNet
from tests.helpers.oracle import assert_equal_weights, joined_weights, mini_batches_of, oracle
from tests.helpers.pool import Pools, impatient
from tests.helpers.trainer import Net, Run, evaluate, fit, loader, make_trainer, staged, train
from tests.trainer.callbacks.callback_table import BASE, NOTE, PAGE, REFUSED, TABLE, WORKS, Entry, make, page

WORKING = [entry for entry in TABLE if entry.verdict in (WORKS, NOTE)]


def run_with(name: str, folder: Path) -> Run:
    options = {"enable_checkpointing": True, "enable_progress_bar": True, "enable_model_summary": True}
    trainer = {"max_epochs": 2, "logger": "list", "default_root_dir": str(folder)}
    return Run(Net, callbacks=((make, {"name": name}),), trainer=trainer | options, samples=24, val_samples=(8,))


@functools.cache
def by_the_oracle(accumulate: int) -> dict[str, np.ndarray]:
    run = Run(Net, samples=24)
    return oracle(run, 2, list(mini_batches_of(run, 2, accumulate=accumulate)))[0]


@pytest.mark.parametrize("entry", WORKING, ids=lambda entry: entry.name)
def test_training_is_the_oracles(entry: Entry, tmp_path: Path) -> None:
    result = train(staged(run_with(entry.name, tmp_path), 2))
    if "WeightAveraging" not in entry.name:  # it ends with averaged weights, see test_averages.py
        accumulate = 2 if entry.name == "GradientAccumulationScheduler" else 1
        assert_equal_weights(result["weights"], by_the_oracle(accumulate))


@pytest.mark.parametrize("entry", [e for e in TABLE if e.verdict == REFUSED], ids=lambda entry: entry.name)
def test_refused(entry: Entry, tmp_path: Path) -> None:
    run = replace(run_with(entry.name, tmp_path), module=BackboneNet)
    with pytest.raises(Exception, match=r"cannot work under a pipeline|Batch size finder is not supported"):
        train(staged(run, 2))


# -- several ranks ------------------------------------------------------------------------------------------------


def test_prediction_writer(pools: Pools) -> None:
    run = Run(Net, callbacks=((make, {"name": "BasePredictionWriter"}),), val_samples=(9,))
    results = pools.run(2, evaluate, run, "predict")
    assert [len(batch) for batch in results[0]["returned"]] == [8, 1]
    assert [result["written"] for result in results] == [[8, 1], [None, None]]


def fit_and_validate(run: Run) -> list[float]:
    """Train, and return val_loss: of the training, and of its checkpoint."""
    module, trainer = run.module(run), make_trainer(run)
    trainer.fit(module, loader(run, shuffle=run.shuffle), loader(run))
    trained = float(trainer.callback_metrics["val_loss"])
    (again,) = trainer.validate(module, loader(run), ckpt_path="best", verbose=False, weights_only=True)
    return [trained, again["val_loss"]]


def saving_run(module: Any, folder: Path, *others: Any, **more: Any) -> Run:
    saves = (callbacks.ModelCheckpoint, {"dirpath": folder})
    return Run(module, callbacks=(*others, saves), trainer={"enable_checkpointing": True, "max_epochs": 2}, **more)


def test_averages_are_validated_by_the_trainer_that_made_them(pools: Pools, tmp_path: Path) -> None:
    run = saving_run(Net, tmp_path, (callbacks.EMAWeightAveraging, {"decay": 0.8}))
    for trained, again in pools.run(2, fit_and_validate, run):
        assert again == trained


def test_replicas_validate_with_the_buffers_of_the_checkpoint(pools: Pools, tmp_path: Path) -> None:
    run = saving_run(BatchNormNet, tmp_path, options={"data_parallel_size": 2}, shuffle=True)
    for trained, again in pools.run(4, fit_and_validate, run):
        assert again == trained


def test_throughput_is_counted_on_the_last_stage_alone(pools: Pools, tmp_path: Path) -> None:
    first, *others = pools.run(3, fit, run_with("ThroughputMonitor", tmp_path))
    rows = [metrics for _, metrics in first["records"] if "train/samples" in metrics]
    assert [row["train/samples"] for row in rows] == [8.0 * batch for batch in range(1, 7)]
    assert rows[-1]["train/samples_per_sec"] == pytest.approx(3 * rows[-1]["train/device/samples_per_sec"])
    assert not any(other["records"] for other in others)


def test_a_timer_that_runs_out_stops_all_ranks(pools: Pools) -> None:
    run = Run(Net, samples=80_000, trainer={"max_time": timedelta(seconds=0.2)})
    results = pools.run(2, fit, run)
    steps = results[0]["global_step"]
    assert results[1]["global_step"] == steps > 0
    same = train(staged(replace(run, trainer={"max_steps": steps}), 2))
    assert_equal_weights(joined_weights(results, 2), same["weights"])


class Hears(Net):
    """Module that counts the calls of its hooks, and whether all gradients exist before a step."""

    called: Counter[str] = Counter()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.called[f"before a step, {all(p.grad is not None for p in self.parameters())}"] += 1


def heard(name: str) -> Any:
    return lambda self, *_, **__: self.called.update([name])


HOOKS = (
    "setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_backward",
    "on_after_backward", "on_train_batch_end", "on_validation_batch_end", "on_train_epoch_end", "teardown",
)  # fmt: skip
for hook in HOOKS:
    setattr(Hears, hook, heard(hook))


def fit_and_hear(run: Run) -> tuple[str, dict[str, int]]:
    """Train, and return what was printed and how often each hook was called."""
    Hears.called = Counter()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        fit(run)
    return printed.getvalue(), dict(Hears.called)


def test_hooks_are_called_as_often_as_in_a_plain_run_and_one_bar_is_shown(pools: Pools, tmp_path: Path) -> None:
    run = replace(run_with("TQDMProgressBar", tmp_path), module=Hears)
    (shown, first), (other, second) = pools.run(2, fit_and_hear, run)
    assert ("train_loss_step=" in shown, other) == (True, "")
    assert first == second == fit_and_hear(replace(run, strategy="plain"))[1]
    assert first["before a step, True"] == 6


class FailsOnTheLastStage(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        raise ArithmeticError("the user's own mistake")


def test_a_failed_run_saves_nothing_and_shows_its_error(pools: Pools, tmp_path: Path) -> None:
    saving = (callbacks.OnExceptionCheckpoint, {"dirpath": str(tmp_path)})
    run = Run(FailsOnTheLastStage, callbacks=(saving,), trainer={"enable_checkpointing": True})
    errors = {outcome.error for outcome in pools.outcomes(2, impatient, fit, run)}
    assert errors == {"ArithmeticError", "OtherStageFailedError"}, "not one of saving"
    assert not list(tmp_path.iterdir())


# -- the table -------------------------------------------------------------------------------------------------------


def test_the_table_is_complete_and_the_page_in_step() -> None:
    """The table is complete and the page up to date; ``python -m tests.trainer.callbacks.callback_table`` writes it."""
    assert [entry.name for entry in TABLE] == sorted(callbacks.__all__, key=str.lower)
    assert all(entry.note for entry in TABLE if entry.verdict != WORKS)
    assert {entry.name for entry in TABLE if entry.verdict == BASE} == {"Callback", "Checkpoint", "ProgressBar"}
    assert PAGE.read_text() == page()
