"""Hooks that read weights to which an update is still to come are named; no other ones."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch import callbacks

from tests.trainer.hooks import reads
from tests.trainer.pool import Pools
from tests.trainer.reference import assert_equal_weights, joined_weights, mini_batches_of, oracle
from tests.trainer.runs import Net, Run, arrays, fit_and_hear, loader, make_trainer

PART = "before the last update has been applied"
LAYOUTS = [
    (2, {}),
    pytest.param(3, {}, marks=pytest.mark.slow),
    pytest.param(4, {"data_parallel_size": 2}, marks=pytest.mark.slow),
]


def owners(heard: list[str]) -> list[str]:
    return sorted(re.findall(r"\w+ of (\w+) reads weights \(model\.", text)[0] for text in heard)


@pytest.mark.parametrize(("ranks", "options"), LAYOUTS)
def test_readers_are_named_once(pools: Pools, ranks: int, options: dict[str, Any]) -> None:
    """On every rank; the training is what it is without them."""
    run = reads.reading(options=options)
    results = pools.run(ranks, fit_and_hear, run, PART)
    for _, heard in results:
        assert owners(heard) == sorted(callback.__name__ for callback in reads.READ)
    assert "on_train_batch_end of Ema" in "\n".join(results[0][1])
    assert "on_before_zero_grad of Vectors" in "\n".join(results[0][1])
    assert all("after_own_update" in text for text in results[0][1])
    if ranks == 2:
        weights, _ = oracle(run, 2, list(mini_batches_of(run)))
        assert_equal_weights(joined_weights([result for result, _ in results], 2), weights)


@pytest.mark.parametrize(("ranks", "options"), LAYOUTS)
def test_those_that_read_nothing_are_not(pools: Pools, ranks: int, options: dict[str, Any], tmp_path: Path) -> None:
    silent: tuple[Any, ...] = (
        (reads.Facts, {}),
        (reads.AtEnds, {}),
        (reads.GathersThenReads, {}),
        (reads.marked_ema, {}),
        (callbacks.EMAWeightAveraging, {"decay": 0.6}),
        (callbacks.ThroughputMonitor, {"batch_size_fn": len}),
        (callbacks.ModelCheckpoint, {"dirpath": str(tmp_path / "a"), "every_n_train_steps": 1}),
        (reads.SavesThenReads, {"dirpath": str(tmp_path / "b"), "every_n_train_steps": 2}),
    )
    trainer = {"enable_progress_bar": True, "logger": "list", "enable_checkpointing": True, "max_epochs": 2}
    run = Run(reads.ReadsAtOwnEnd, options=options, callbacks=silent, trainer=trainer, val_samples=(8,))
    for _, heard in pools.run(ranks, fit_and_hear, run, PART):
        assert heard == []


def test_not_between_drains(pools: Pools, tmp_path: Path) -> None:
    """Other than above nothing else drains the pipeline there."""
    run = Run(Net, callbacks=((reads.Facts, {}), (reads.marked_ema, {}), (reads.GathersThenReads, {})), samples=32)
    for _, heard in pools.run(2, fit_and_hear, run, PART):
        assert heard == []


def test_not_in_a_synchronous_pipeline(pools: Pools) -> None:
    for _, heard in pools.run(2, fit_and_hear, reads.reading(strategy="sync"), PART):
        assert heard == []


def test_the_modules_own_step(pools: Pools) -> None:
    """A mean of weights is often brought up to date after ``super().optimizer_step(...)``."""
    for _, heard in pools.run(2, fit_and_hear, Run(reads.ReadsAsModule), PART):
        (text,) = heard
        assert text.startswith("optimizer_step of ReadsAsModule")
        assert "its on_train_batch_end is called" in text


def means(run: Run) -> dict[str, np.ndarray]:
    """What a marked callback's average comes to."""
    L.seed_everything(run.seed, verbose=False)
    ema = reads.marked_ema()
    make_trainer(run, callbacks=[ema]).fit(run.module(run), loader(run))
    assert "on_train_batch_end" not in vars(ema)
    return arrays(ema.mean)


def test_the_way_out_averages_as_one_process_does(pools: Pools) -> None:
    run = Run(Net)
    by_stage = pools.run(2, means, run)
    (whole,) = pools.run(1, means, replace(run, strategy="delayed", options={"delay": 1, "micro_batches": 2}))
    assert_equal_weights({**by_stage[0], **by_stage[1]}, whole)


def fail(run: Run) -> tuple[str, int, list[str]]:
    """The error of a training, how many modes it left, and what its callback keeps."""
    callback, error = reads.Fails(), ""
    try:
        make_trainer(run, callbacks=[callback]).fit(run.module(run), loader(run))
    except BaseException as caught:
        error = type(caught).__name__
    return error, torch._C._len_torch_function_stack(), list(vars(callback))


def test_nothing_is_left_after_a_failure(pools: Pools) -> None:
    for error, modes, kept in pools.run(2, fail, Run(Net)):
        assert error in ("ArithmeticError", "OtherStageFailedError")
        assert modes == 0
        assert "on_train_batch_end" not in kept


def test_a_second_fit_warns_again(pools: Pools) -> None:
    run = Run(Net, callbacks=((reads.Ema, {}),))
    for _ in range(2):
        assert [len(heard) for _, heard in pools.run(2, fit_and_hear, run, PART)] == [1, 1]
