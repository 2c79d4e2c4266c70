"""Every callback that Lightning exports works, or is refused with a reason; the page about them is in step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from lightning.pytorch import callbacks

from tests.trainer.callback_table import BASE, NOTE, PAGE, REFUSED, TABLE, WORKS, Entry, make, page
from tests.trainer.modules import BackboneNet
from tests.trainer.pool import Pools
from tests.trainer.reference import assert_equal_weights, joined_weights, mini_batches_of, oracle
from tests.trainer.runs import Net, Run, evaluate, fit

WORKING = [entry for entry in TABLE if entry.verdict in (WORKS, NOTE)]
NO_BAR = {"enable_progress_bar": True, "enable_model_summary": True}


def run_with(entry: Entry, folder: Path) -> Run:
    trainer = {
        "max_epochs": 2,
        "logger": "list",
        "default_root_dir": str(folder),
        "enable_checkpointing": True,
    } | NO_BAR
    return Run(Net, callbacks=((make, {"name": entry.name}),), trainer=trainer, val_samples=(8,))


@pytest.mark.parametrize("entry", WORKING, ids=[entry.name for entry in WORKING])
def test_working(pools: Pools, entry: Entry, tmp_path: Path) -> None:
    """The run ends, all ranks know the same, and the weights are the oracle's."""
    run = run_with(entry, tmp_path)
    results = pools.run(2, fit, run)
    assert results[0]["callback_metrics"] == results[1]["callback_metrics"]
    accumulate = 2 if entry.name == "GradientAccumulationScheduler" else 1
    weights, _ = oracle(run, 2, list(mini_batches_of(run, 2, accumulate=accumulate)))
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


@pytest.mark.parametrize("name", ["ThroughputMonitor", "DeviceStatsMonitor", "TQDMProgressBar"])
def test_on_three_stages(pools: Pools, name: str, tmp_path: Path) -> None:
    """A middle stage has no batches to measure."""
    entry = next(entry for entry in TABLE if entry.name == name)
    results = pools.run(3, fit, run_with(entry, tmp_path))
    assert {result["global_step"] for result in results} == {10}


def test_prediction_writer(pools: Pools) -> None:
    run = Run(Net, callbacks=((make, {"name": "BasePredictionWriter"}),), val_samples=(9,))
    results = pools.run(2, evaluate, run, "predict")
    assert [len(batch) for batch in results[0]["returned"]] == [8, 1]
    assert [result["written"] for result in results] == [[8, 1], [None, None]]


def test_a_timer_that_runs_out_stops_all_ranks(pools: Pools) -> None:
    run = Run(Net, samples=80_000, trainer={"max_time": "00:00:00:01"})
    results = pools.run(2, fit, run)
    assert results[0]["global_step"] == results[1]["global_step"] > 0
    assert_equal_weights(
        joined_weights(results, 2),
        joined_weights(pools.run(2, fit, replace(run, trainer={"max_steps": results[0]["global_step"]})), 2),
    )


def test_table_is_complete() -> None:
    assert [entry.name for entry in TABLE] == sorted((entry.name for entry in TABLE), key=str.lower)
    assert {entry.name for entry in TABLE} == set(callbacks.__all__)
    assert {entry.verdict for entry in TABLE} <= {WORKS, NOTE, REFUSED, BASE}
    assert all(entry.note for entry in TABLE if entry.verdict != WORKS)
    assert {entry.name for entry in TABLE if entry.verdict == BASE} == {"Callback", "Checkpoint", "ProgressBar"}


def test_page_is_in_step() -> None:
    """``python -m tests.trainer.callback_table`` writes it."""
    assert PAGE.read_text() == page()
