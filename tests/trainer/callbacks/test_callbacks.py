"""Every callback that Lightning exports works, or is refused with a reason; the page about them is in step."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.accelerators import CPUAccelerator

from tests.helpers.modules import BackboneNet
from tests.helpers.oracle import assert_equal_weights, joined_weights, mini_batches_of, oracle
from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, arrays, evaluate, fit, loader, make_trainer, report
from tests.trainer.callbacks.callback_table import BASE, NOTE, PAGE, REFUSED, TABLE, WORKS, Entry, make, page

WORKING = [entry for entry in TABLE if entry.verdict in (WORKS, NOTE)]
NO_BAR = {"enable_progress_bar": True, "enable_model_summary": True}


def entry_of(name: str) -> Entry:
    return next(entry for entry in TABLE if entry.name == name)


def run_with(entry: Entry, folder: Path, epochs: int = 2) -> Run:
    trainer = {
        "max_epochs": epochs,
        "logger": "list",
        "default_root_dir": str(folder),
        "enable_checkpointing": True,
    } | NO_BAR
    return Run(Net, callbacks=((make, {"name": entry.name}),), trainer=trainer, val_samples=(8,))


# Relatives of theirs, or tests of their own here and in test_features.py and test_averages.py, run by default.
ALIKE = (
    *("TQDMProgressBar", "RichModelSummary", "EMAWeightAveraging", "WeightAveraging", "Timer", "LearningRateMonitor"),
    *("BasePredictionWriter", "ThroughputMonitor", "LambdaCallback"),
)


@pytest.mark.parametrize(
    "entry",
    [pytest.param(e, id=e.name, marks=[pytest.mark.slow] if e.name in ALIKE else []) for e in WORKING],
)
def test_working(pools: Pools, entry: Entry, tmp_path: Path) -> None:
    """The run ends, all ranks know the same, and the weights are the oracle's."""
    run = run_with(entry, tmp_path)
    results = pools.run(2, fit, run)
    assert results[0]["callback_metrics"] == results[1]["callback_metrics"]
    accumulate = 2 if entry.name == "GradientAccumulationScheduler" else 1
    weights, _ = oracle(run, 2, list(mini_batches_of(run, 2, accumulate=accumulate)))
    if "WeightAveraging" not in entry.name:  # in the end it puts averages in their place: test_averages.py
        assert_equal_weights(joined_weights(results, 2), weights)


@pytest.mark.parametrize("entry", [e for e in TABLE if e.verdict == REFUSED], ids=lambda entry: entry.name)
def test_refused(pools: Pools, entry: Entry, tmp_path: Path) -> None:
    for outcome in pools.outcomes(2, fit, replace(run_with(entry, tmp_path), module=BackboneNet)):
        if entry.name == "BatchSizeFinder":  # Lightning is faster
            assert "Batch size finder is not supported with distributed strategies" in outcome.message
            continue
        assert outcome.error == "ConfigurationError", outcome.trace
        assert "cannot work under a pipeline" in outcome.message
        assert "leave it out" in outcome.message


SLOW_ON_THREE = [pytest.param(name, marks=pytest.mark.slow) for name in ("DeviceStatsMonitor", "TQDMProgressBar")]


@pytest.mark.parametrize("name", ["ThroughputMonitor", *SLOW_ON_THREE])
def test_on_three_stages(pools: Pools, name: str, tmp_path: Path) -> None:
    """A middle stage has no batches to measure."""
    results = pools.run(3, fit, run_with(entry_of(name), tmp_path))
    assert {result["global_step"] for result in results} == {10}


# -- what the notes say --------------------------------------------------------------------------------------------


def test_prediction_writer(pools: Pools) -> None:
    run = Run(Net, callbacks=((make, {"name": "BasePredictionWriter"}),), val_samples=(9,))
    results = pools.run(2, evaluate, run, "predict")
    assert [len(batch) for batch in results[0]["returned"]] == [8, 1]
    assert [result["written"] for result in results] == [[8, 1], [None, None]]


def test_early_stopping_stops(pools: Pools, tmp_path: Path) -> None:
    results = pools.run(2, fit, run_with(entry_of("EarlyStopping"), tmp_path, epochs=5))
    assert [result["epoch"] for result in results] == [2, 2]


def test_throughput_is_too_high_by_the_number_of_stages(pools: Pools, tmp_path: Path) -> None:
    """The figure per device is the pipeline's, and the global one that times P."""
    for stages in (2, 3):
        results = pools.run(stages, fit, run_with(entry_of("ThroughputMonitor"), tmp_path))
        rows = [m for _, m in results[0]["records"] if "train/samples" in m]
        assert [row["train/samples"] for row in rows] == [8.0 * batch for batch in range(1, 11)]
        for before, row in itertools.pairwise(rows):
            rate = 8 / (row["train/time"] - before["train/time"])
            assert row["train/device/samples_per_sec"] == pytest.approx(rate, rel=1e-3)
            assert row["train/samples_per_sec"] == pytest.approx(stages * rate, rel=1e-3)
        assert len(rows) == 10
        assert not any(result["records"] for result in results[1:])


def fit_with_device_stats(run: Run) -> list[tuple[int, dict[str, float]]]:
    """Train with a device whose only figure is the rank; what was logged of it."""
    own = CPUAccelerator.get_device_stats
    CPUAccelerator.get_device_stats = lambda *_: {"rank": float(os.environ["RANK"])}  # type: ignore[method-assign]
    try:
        records = fit(run)["records"]
    finally:
        CPUAccelerator.get_device_stats = own  # type: ignore[method-assign]
    return [record for record in records if any("DeviceStatsMonitor" in name for name in record[1])]


def test_device_stats_are_those_of_rank_zero(pools: Pools) -> None:
    run = Run(Net, callbacks=((callbacks.DeviceStatsMonitor, {"cpu_stats": True}),), trainer={"logger": "list"})
    first, second = pools.run(2, fit_with_device_stats, run)
    assert len(first) == 10  # before and after each of five batches
    assert {value for _, metrics in first for value in metrics.values()} == {0.0}
    assert second == []


@contextlib.contextmanager
def captured() -> Iterator[io.StringIO]:
    """What is printed, and what Lightning logs, meanwhile."""
    text = io.StringIO()
    handler, logger = logging.StreamHandler(text), logging.getLogger("lightning.pytorch")
    logger.addHandler(handler)
    try:
        with contextlib.redirect_stdout(text):
            yield text
    finally:
        logger.removeHandler(handler)


def fit_and_read(run: Run) -> dict[str, Any]:
    """Train; what a user would read, and the number of parameters of this rank."""
    with captured() as text:
        result = fit(run)
    return {"text": text.getvalue(), "parameters": sum(w.size for w in result["weights"].values())}


@pytest.mark.parametrize("name", ["ModelSummary", "RichModelSummary"])
def test_the_summary_shows_all_stages_once(pools: Pools, name: str, tmp_path: Path) -> None:
    run = run_with(entry_of(name), tmp_path, epochs=1)
    first, second = pools.run(2, fit_and_read, replace(run, trainer=run.trainer | {"enable_progress_bar": False}))
    assert first["parameters"] != second["parameters"]
    assert first["text"].count("Stages of the pipeline") == 1, first["text"]
    rows = dict(re.findall(r"^ *(0|1|all) .* (\d+) *$", first["text"], re.MULTILINE))
    sizes = {"1": first["parameters"], "0": second["parameters"]}  # rank 0 is the last stage
    assert {stage: int(size) for stage, size in rows.items()} == {**sizes, "all": sum(sizes.values())}
    assert "Trainable params" not in first["text"] + second["text"]
    assert "Stages of the pipeline" not in second["text"]


class KeepsWhatItShows(callbacks.TQDMProgressBar):
    """Keeps the figures that it puts beside the bar after every training batch."""

    def __init__(self) -> None:
        super().__init__(refresh_rate=1)
        self.shown: list[float | None] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.shown.append(self.get_metrics(trainer, pl_module).get("train_loss_step"))  # type: ignore[arg-type]


def fit_with_bar(run: Run) -> dict[str, Any]:
    bar = KeepsWhatItShows()
    L.seed_everything(run.seed, verbose=False)
    with captured() as text:
        make_trainer(run, callbacks=[bar], enable_progress_bar=True).fit(run.module(run), loader(run))
    return {"text": text.getvalue(), "shown": bar.shown}


def test_progress_bar_shows_the_loss(pools: Pools) -> None:
    """Of the batch that has run; one bar only, rank 0's."""
    run = Run(Net)
    _, losses = oracle(run, 2, list(mini_batches_of(run)))
    first, second = pools.run(2, fit_with_bar, run)
    assert first["shown"] == pytest.approx(losses[:5], rel=1e-5)
    for loss in losses[:5]:
        assert f"train_loss_step={loss:.3g}" in first["text"]
    assert "Epoch" not in second["text"]


def fit_with_lambdas(run: Run) -> dict[str, Any]:
    """Train with functions at several hooks; what they saw."""
    called: list[str] = []
    gradients: list[bool] = []

    def note(name: str) -> Any:
        return lambda *_, **__: called.append(name)

    def before_step(trainer: Any, module: Any, optimizer: Any) -> None:
        called.append("on_before_optimizer_step")
        gradients.append(all(p.grad is not None for p in module.parameters()))

    names = [
        "setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start",
        "on_before_backward", "on_after_backward", "on_train_batch_end", "on_validation_batch_end",
        "on_train_epoch_end", "on_train_end", "teardown",
    ]  # fmt: skip
    hooks = {name: note(name) for name in names} | {"on_before_optimizer_step": before_step}
    L.seed_everything(run.seed, verbose=False)
    module, trainer = run.module(run), make_trainer(run, callbacks=[callbacks.LambdaCallback(**hooks)])
    trainer.fit(module, loader(run), loader(run, 24))
    return report(trainer, module) | {"called": called, "gradients": gradients}


def test_lambdas_are_called_as_often_as_in_a_plain_run(pools: Pools) -> None:
    """On every rank; an update has its gradients, also where it comes one batch later."""
    run = Run(Net, trainer={"max_epochs": 2})
    results = pools.run(2, fit_with_lambdas, run)
    (plain,) = pools.run(1, fit_with_lambdas, replace(run, strategy="plain"))
    for result in results:
        assert Counter(result["called"]) == Counter(plain["called"])
        assert result["gradients"] == [True] * 10
    assert Counter(plain["called"])["on_validation_batch_end"] == 6


def test_a_timer_that_runs_out_stops_all_ranks(pools: Pools) -> None:
    run = Run(Net, samples=80_000, trainer={"max_time": "00:00:00:01"})
    results = pools.run(2, fit, run)
    assert results[0]["global_step"] == results[1]["global_step"] > 0
    assert_equal_weights(
        joined_weights(results, 2),
        joined_weights(pools.run(2, fit, replace(run, trainer={"max_steps": results[0]["global_step"]})), 2),
    )


def count_broadcasts(run: Run) -> tuple[int, int]:
    """Train with a strategy that counts; the number of broadcasts, and of epochs that were begun."""
    module, trainer = run.module(run), make_trainer(run)
    broadcast, called = trainer.strategy.broadcast, []

    def counting(*args: Any, **kwargs: Any) -> Any:
        called.append(1)
        return broadcast(*args, **kwargs)

    trainer.strategy.broadcast = counting  # type: ignore[method-assign]
    trainer.fit(module, loader(run))
    return len(called), trainer.current_epoch


def test_a_timer_broadcasts_per_batch_or_per_epoch(pools: Pools) -> None:
    counts = {}
    for interval in ("step", "epoch"):
        timer = (callbacks.Timer, {"duration": timedelta(minutes=5), "interval": interval})
        for batches in (3, 9):
            run = Run(Net, callbacks=(timer,), samples=8 * batches)
            (counts[interval, batches], _), _ = pools.run(2, count_broadcasts, run)
    assert counts["step", 9] - counts["step", 3] == 6
    assert counts["epoch", 9] == counts["epoch", 3]


def test_a_timer_by_epoch_stops_all_ranks(pools: Pools) -> None:
    timer = (callbacks.Timer, {"duration": timedelta(microseconds=1), "interval": "epoch"})
    results = pools.run(2, fit, Run(Net, callbacks=(timer,), trainer={"max_epochs": 3}))
    assert [result["steps"] for result in results] == [[1, 2, 3, 4, 5]] * 2


class FailsOnTheLastStage(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        raise ArithmeticError("the user's own mistake")


class TermOnOneRank(callbacks.Callback):
    """SIGTERM reaches one process."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1 and batch_idx == 3:
            signal.raise_signal(signal.SIGTERM)


def on_exception(folder: Path, **options: Any) -> Run:
    saving = (callbacks.OnExceptionCheckpoint, {"dirpath": str(folder)})
    trainer = {"enable_checkpointing": True, "default_root_dir": str(folder)}
    return Run(**options, callbacks=(saving, (TermOnOneRank, {})), samples=400, trainer=trainer)


def test_nothing_is_saved_after_a_failure(pools: Pools, tmp_path: Path) -> None:
    outcomes = pools.outcomes(2, fit, on_exception(tmp_path, module=FailsOnTheLastStage))
    assert {outcome.error for outcome in outcomes} == {"ArithmeticError", "OtherStageFailedError"}, (
        "and not one of saving"
    )
    assert all("the user's own mistake" in outcome.message for outcome in outcomes)
    assert not list(tmp_path.iterdir())


def test_the_weights_are_saved_after_sigterm(pools: Pools, tmp_path: Path) -> None:
    run = on_exception(tmp_path, module=Net)
    outcomes = pools.outcomes(2, fit, run)
    assert {outcome.error for outcome in outcomes} == {"SIGTERMException"}
    content = torch.load(tmp_path / "on_exception.ckpt", weights_only=True)
    assert 4 <= content["global_step"] <= 7
    weights, _ = oracle(run, 2, list(mini_batches_of(run))[: content["global_step"]])
    assert_equal_weights(arrays(content["state_dict"]), weights)


def test_table_is_complete() -> None:
    assert [entry.name for entry in TABLE] == sorted((entry.name for entry in TABLE), key=str.lower)
    assert {entry.name for entry in TABLE} == set(callbacks.__all__)
    assert {entry.verdict for entry in TABLE} <= {WORKS, NOTE, REFUSED, BASE}
    assert all(entry.note for entry in TABLE if entry.verdict != WORKS)
    assert {entry.name for entry in TABLE if entry.verdict == BASE} == {"Callback", "Checkpoint", "ProgressBar"}


def test_page_is_in_step() -> None:
    """``python -m tests.trainer.callbacks.callback_table`` writes it."""
    assert PAGE.read_text() == page()
