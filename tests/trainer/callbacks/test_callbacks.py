"""Every callback that Lightning exports works, or is refused with a reason; the page about them is in step."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import logging
import re
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import callbacks

from tests.helpers.modules import BackboneNet
from tests.helpers.oracle import assert_equal_weights, joined_weights, mini_batches_of, oracle
from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, arrays, evaluate, fit, staged, train
from tests.trainer.callbacks.callback_table import BASE, NOTE, PAGE, REFUSED, TABLE, WORKS, Entry, make, page

WORKING = [entry for entry in TABLE if entry.verdict in (WORKS, NOTE)]


def run_with(name: str, folder: Path, epochs: int = 2) -> Run:
    options = {"enable_checkpointing": True, "enable_progress_bar": True, "enable_model_summary": True}
    trainer = {"max_epochs": epochs, "logger": "list", "default_root_dir": str(folder)}
    return Run(Net, callbacks=((make, {"name": name}),), trainer=trainer | options, val_samples=(8,))


@functools.cache
def by_the_oracle(accumulate: int) -> dict[str, np.ndarray]:
    run = Run(Net)
    return oracle(run, 2, list(mini_batches_of(run, 2, accumulate=accumulate)))[0]


@pytest.mark.parametrize("entry", WORKING, ids=lambda entry: entry.name)
def test_training_is_the_oracles(entry: Entry, tmp_path: Path) -> None:
    result = train(staged(run_with(entry.name, tmp_path), 2))
    if "WeightAveraging" not in entry.name:  # in the end it puts averages in their place: test_averages.py
        accumulate = 2 if entry.name == "GradientAccumulationScheduler" else 1
        assert_equal_weights(result["weights"], by_the_oracle(accumulate))


@pytest.mark.parametrize("entry", [e for e in TABLE if e.verdict == REFUSED], ids=lambda entry: entry.name)
def test_refused(entry: Entry, tmp_path: Path) -> None:
    run = replace(run_with(entry.name, tmp_path), module=BackboneNet)
    with pytest.raises(Exception, match=r"cannot work under a pipeline|Batch size finder is not supported"):
        train(staged(run, 2))


# -- where ranks differ -------------------------------------------------------------------------------------------


def test_early_stopping_and_checkpoints_decide_alike(pools: Pools, tmp_path: Path) -> None:
    run = run_with("EarlyStopping", tmp_path, epochs=5)
    results = pools.run(2, fit, replace(run, callbacks=(*run.callbacks, (make, {"name": "ModelCheckpoint"}))))
    assert [result["epoch"] for result in results] == [2, 2]
    assert results[0]["callback_metrics"] == results[1]["callback_metrics"]
    assert results[0]["best"] == results[1]["best"]
    assert Path(results[0]["best"]).exists()
    assert_equal_weights(joined_weights(results, 2), by_the_oracle(1))


def test_prediction_writer(pools: Pools) -> None:
    run = Run(Net, callbacks=((make, {"name": "BasePredictionWriter"}),), val_samples=(9,))
    results = pools.run(2, evaluate, run, "predict")
    assert [len(batch) for batch in results[0]["returned"]] == [8, 1]
    assert [result["written"] for result in results] == [[8, 1], [None, None]]


def test_throughput_is_too_high_by_the_number_of_stages(pools: Pools, tmp_path: Path) -> None:
    """The figure per device is the pipeline's, and the global one that times P; a middle stage measures nothing."""
    results = pools.run(3, fit, run_with("ThroughputMonitor", tmp_path))
    rows = [m for _, m in results[0]["records"] if "train/samples" in m]
    assert [row["train/samples"] for row in rows] == [8.0 * batch for batch in range(1, 11)]
    for before, row in itertools.pairwise(rows):
        rate = 8 / (row["train/time"] - before["train/time"])
        assert row["train/device/samples_per_sec"] == pytest.approx(rate, rel=1e-3)
        assert row["train/samples_per_sec"] == pytest.approx(3 * rate, rel=1e-3)
    assert not any(result["records"] for result in results[1:])


def test_a_timer_that_runs_out_stops_all_ranks(pools: Pools) -> None:
    run = Run(Net, samples=80_000, trainer={"max_time": "00:00:00:01"})
    results = pools.run(2, fit, run)
    steps = results[0]["global_step"]
    assert results[1]["global_step"] == steps > 0
    same = train(staged(replace(run, trainer={"max_steps": steps}), 2))
    assert_equal_weights(joined_weights(results, 2), same["weights"])


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


class Hears(Net):
    """Notes the hooks that are called, and whether an update has its gradients."""

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


def fit_and_read(run: Run) -> dict[str, Any]:
    """Train; what a user would read, the hooks that were called, the number of parameters of this rank."""
    Hears.called = Counter()
    with captured() as text:
        result = fit(run)
    size = sum(weights.size for weights in result["weights"].values())
    return {"text": text.getvalue(), "size": size, "called": dict(Hears.called), "losses": result["losses"]}


def test_what_a_user_reads_and_which_hooks_are_called(pools: Pools, tmp_path: Path) -> None:
    """One table of all stages, one bar, rank 0's, with the loss of the batch; hooks as often as in a plain run."""
    bars = tuple((make, {"name": name}) for name in ("TQDMProgressBar", "ModelSummary"))
    run = replace(run_with("ModelSummary", tmp_path), module=Hears, callbacks=bars)
    first, second = pools.run(2, fit_and_read, run)
    assert first["text"].count("Stages of the pipeline") == 1, first["text"]
    rows = dict(re.findall(r"^ *(0|1|all) .* (\d+) *$", first["text"], re.MULTILINE))
    sizes = {"1": first["size"], "0": second["size"]}  # rank 0 is the last stage
    assert {stage: int(size) for stage, size in rows.items()} == {**sizes, "all": sum(sizes.values())}
    for loss in first["losses"]:
        assert f"train_loss_step={loss:.3g}" in first["text"]
    assert not re.search("Epoch|Stages of|Trainable params", second["text"])
    plain = fit_and_read(replace(run, strategy="plain"))["called"]
    assert first["called"] == second["called"] == plain
    assert plain["before a step, True"] == 10


class FailsOnTheLastStage(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        raise ArithmeticError("the user's own mistake")


class TermOnOneRank(callbacks.Callback):
    """SIGTERM reaches one process."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1 and batch_idx == 3:
            signal.raise_signal(signal.SIGTERM)


def test_on_exception_nothing_is_saved_but_after_sigterm_the_weights_are(pools: Pools, tmp_path: Path) -> None:
    saving = (callbacks.OnExceptionCheckpoint, {"dirpath": str(tmp_path)})
    trainer = {"enable_checkpointing": True, "default_root_dir": str(tmp_path)}
    run = Run(Net, callbacks=(saving, (TermOnOneRank, {})), samples=400, trainer=trainer)
    failed = pools.outcomes(2, fit, replace(run, module=FailsOnTheLastStage))
    assert {outcome.error for outcome in failed} == {"ArithmeticError", "OtherStageFailedError"}, "not one of saving"
    assert not list(tmp_path.iterdir())
    assert {outcome.error for outcome in pools.outcomes(2, fit, run)} == {"SIGTERMException"}
    content = torch.load(tmp_path / "on_exception.ckpt", weights_only=True)
    weights, _ = oracle(run, 2, list(mini_batches_of(run))[: content["global_step"]])
    assert_equal_weights(arrays(content["state_dict"]), weights)


# -- the table -------------------------------------------------------------------------------------------------------


def test_table_is_complete() -> None:
    assert [entry.name for entry in TABLE] == sorted((entry.name for entry in TABLE), key=str.lower)
    assert {entry.name for entry in TABLE} == set(callbacks.__all__)
    assert all(entry.note for entry in TABLE if entry.verdict != WORKS)
    assert {entry.name for entry in TABLE if entry.verdict == BASE} == {"Callback", "Checkpoint", "ProgressBar"}


def test_page_is_in_step() -> None:
    """``python -m tests.trainer.callbacks.callback_table`` writes it."""
    assert PAGE.read_text() == page()
