"""Trainer.fit under a pipeline ends with the oracle's weights, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim.lr_scheduler import LambdaLR

from lightning_asyncpp.trainer.gpt_module import learning_rate_factor
from tests.helpers.modules import (
    CarryingNet,
    FrozenStatisticsNet,
    InPlaceNet,
    KeywordNet,
    NoisyNet,
    SummingNet,
    WeighingNet,
    small_gpt,
)
from tests.helpers.oracle import (
    assert_equal_weights,
    batches_of,
    joined_parts,
    joined_weights,
    mini_batches_of,
    oracle,
)
from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, fit, initial_weights, make_scheduler

TWO, FOUR = (pytest.param(stages, marks=pytest.mark.slow) for stages in (2, 4))


def check(
    pools: Pools, run: Run, stages: int, mini_batches: list[list[Any]], name: str = "train_loss_step", **how: Any
) -> list[dict[str, Any]]:
    """Train over ``stages`` stages and compare the weights, and the logged losses, with the oracle's.

    Of accumulated batches Lightning logs the last one's.
    """
    microbatches = run.options.get("microbatches", stages)
    results = pools.run(stages, fit, replace(run, trainer=run.trainer | {"logger": "list"}))
    weights, losses = oracle(run, microbatches, mini_batches, **how)
    assert_equal_weights(joined_weights(results, stages), weights)
    logged = [(step, metrics[name]) for step, metrics in results[0]["records"] if name in metrics]
    assert [step for step, _ in logged] == list(range(len(losses)))
    if all(len(batches) == 1 for batches in mini_batches):
        assert [loss for _, loss in logged] == pytest.approx(losses, rel=1e-6)
    assert all(result["global_step"] == len(losses) for result in results)
    return results


@pytest.mark.parametrize("stages", [1, TWO, 3, FOUR])
@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_adamw(pools: Pools, stages: int, strategy: str) -> None:
    """With the layers spread as unevenly as can be."""
    options = {"microbatches": 4, "partition": {1: [9], 2: [1, 8], 3: [6, 2, 1], 4: [1, 2, 1, 5]}[stages]}
    run = Run(Net, strategy, options, scheduler="decay-step", trainer={"max_epochs": 2})
    check(pools, run, stages, list(mini_batches_of(run, 2)))


@pytest.mark.parametrize("stages", [1, 3])
def test_layers_that_change_their_input_in_place(pools: Pools, stages: int) -> None:
    run = Run(InPlaceNet, options={"microbatches": 3})
    check(pools, run, stages, list(mini_batches_of(run)))


@pytest.mark.parametrize("stages", [TWO, 3, FOUR])
@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_error_feedback_around_muon_with_clipping(pools: Pools, stages: int, strategy: str) -> None:
    """Under the synchronous strategy the feedback passes the base optimizer's step through."""
    run = Run(Net, strategy, optimizer="muon", error_feedback=True, scheduler="decay-step", dropout=0.2)
    run = replace(run, trainer={"gradient_clip_val": 0.4})
    check(pools, run, stages, list(mini_batches_of(run)), max_norm=0.4)


@pytest.mark.parametrize("stages", [TWO, 3])
def test_accumulation_over_an_odd_number_of_batches(pools: Pools, stages: int) -> None:
    """Lightning steps on the last batch of an epoch, however many batches there are to accumulate."""
    run = Run(Net, optimizer="muon", error_feedback=True, samples=37, scheduler="decay-step")
    run = replace(run, trainer={"accumulate_grad_batches": 2, "max_epochs": 2, "gradient_clip_val": 0.4})
    batches = list(mini_batches_of(run, epochs=2, accumulate=2))
    assert [len(batch) for batch in batches] == [2, 2, 1] * 2
    check(pools, run, stages, batches, max_norm=0.4)


@pytest.mark.parametrize("stages", [TWO, 3, FOUR])
def test_validation_and_checkpoints_in_mid_epoch(pools: Pools, stages: int, tmp_path: Path) -> None:
    """Each of them drains the pipeline, which changes the clock and not the trajectory."""
    saving = (ModelCheckpoint, {"dirpath": tmp_path, "every_n_train_steps": 3, "save_top_k": -1})
    run = Run(
        Net, samples=52, val_samples=(10,), dropout=0.3, scheduler="decay-step", shuffle=True, callbacks=(saving,)
    )
    run = replace(run, trainer={"max_epochs": 3, "val_check_interval": 2, "enable_checkpointing": True})
    results = check(pools, run, stages, list(mini_batches_of(run, epochs=3)))
    assert len(list(tmp_path.glob("*.ckpt"))) == 7
    assert all("val_loss" in result["callback_metrics"] for result in results)


def test_layers_that_stay_in_evaluation_mode_when_the_pipeline_drains(pools: Pools) -> None:
    """What backwards compute again, in an epoch or at a validation, runs in the mode of the forward."""
    run = Run(FrozenStatisticsNet, val_samples=(10,), trainer={"max_epochs": 2, "val_check_interval": 2})
    check(pools, run, 2, list(mini_batches_of(run, epochs=2)))


@pytest.mark.parametrize("stages", [TWO, 3])
@pytest.mark.parametrize(
    ("trainer", "batches"),
    [({"max_steps": 3, "max_epochs": -1}, slice(3)), ({"limit_train_batches": 4, "max_epochs": 2}, slice(None))],
    ids=["max_steps", "limit_train_batches"],
)
def test_a_run_that_ends_in_mid_epoch(pools: Pools, stages: int, trainer: dict[str, Any], batches: slice) -> None:
    run = Run(Net, trainer=trainer, samples=45, shuffle=True)
    epochs = max(1, trainer["max_epochs"])
    check(pools, run, stages, list(mini_batches_of(run, epochs, trainer.get("limit_train_batches")))[batches])


def test_a_scheduler_that_steps_by_epoch(pools: Pools) -> None:
    run = Run(Net, scheduler="decay-epoch", trainer={"max_epochs": 3}, samples=24)

    def by_epoch(optimizer: Any) -> Callable[[], None]:
        scheduler = make_scheduler(run, optimizer)
        assert scheduler is not None
        steps = itertools.count(1)
        return lambda: scheduler["scheduler"].step() if next(steps) % 3 == 0 else None

    results = check(pools, run, 2, list(mini_batches_of(run, 3)), after_update=by_epoch)
    assert results[0]["rates"] == results[1]["rates"]


def test_keyword_arguments_into_the_first_layer(pools: Pools) -> None:
    run = Run(KeywordNet)
    check(pools, run, 3, list(mini_batches_of(run)))


@pytest.mark.parametrize("stages", [1, 3])
def test_a_dictionary_over_the_cuts(pools: Pools, stages: int) -> None:
    """Of a mask, positions, None and a number; with batches of 8 and 5 samples."""
    run = Run(CarryingNet, options={"microbatches": 3}, samples=29, optimizer="muon", error_feedback=True)
    check(pools, run, stages, list(mini_batches_of(run)))


def test_step_that_draws_random_numbers_around_the_model(pools: Pools) -> None:
    run = Run(NoisyNet, dropout=0.2, trainer={"max_epochs": 2})
    check(pools, run, 3, list(mini_batches_of(run, 2)))


def test_weights_of_microbatches(pools: Pools) -> None:
    """A module may weigh its microbatches, and return sums instead of means."""
    for module in (WeighingNet, SummingNet):
        run = Run(module, samples=39)
        check(pools, run, 3, list(mini_batches_of(run)))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_synchronous_pipeline_is_a_plain_run(pools: Pools, accumulate: int) -> None:
    run = Run(
        Net, optimizer="sgd", scheduler="decay-step", trainer={"max_epochs": 2, "accumulate_grad_batches": accumulate}
    )
    run = replace(run, trainer=run.trainer | {"gradient_clip_val": 0.5}, val_samples=(12,))
    results = pools.run(2, fit, replace(run, strategy="sync"))
    (plain,) = pools.run(1, fit, replace(run, strategy="plain"))
    joined = joined_weights(results, 2)
    assert sorted(joined) == sorted(plain["weights"])
    for name, weight in plain["weights"].items():
        np.testing.assert_allclose(joined[name], weight, rtol=1e-4, atol=1e-6, err_msg=name)
    for result in results:
        assert result["steps"] == plain["steps"]
        assert result["rates"] == plain["rates"]
        assert result["callback_metrics"]["val_loss"] == pytest.approx(plain["callback_metrics"]["val_loss"], rel=1e-4)


def test_two_replicas_of_two_stages(pools: Pools) -> None:
    """The replicas' batches are more microbatches of the same mini-batch; equal to rounding."""
    run = Run(Net, options={"data_parallel_size": 2, "microbatches": 3}, shuffle=True, scheduler="decay-step")
    run = replace(run, trainer={"max_epochs": 2, "gradient_clip_val": 0.5, "logger": "list"}, samples=44, batch_size=4)
    results = pools.run(4, fit, run)
    batches = [
        list(pair)
        for epoch in range(2)
        for pair in zip(*(batches_of(run, epoch, replicas=2, replica=replica) for replica in range(2)))
    ]
    weights, losses = oracle(run, 3, batches, max_norm=0.5)
    for first in (0, 2):
        joined = joined_weights(results[first:], 2)
        for name, weight in weights.items():
            np.testing.assert_allclose(joined[name], weight, rtol=2e-3, atol=1e-5, err_msg=name)
    epochs = [m["train_loss_epoch"] for _, m in results[0]["records"] if "train_loss_epoch" in m]
    sizes = [8, 8, 8, 8, 8, 4]
    assert epochs == pytest.approx([np.average(losses[at : at + 6], weights=sizes) for at in (0, 6)], rel=1e-3)
    assert all(result["callback_metrics"] == results[0]["callback_metrics"] for result in results)


@pytest.mark.parametrize("strategy", ["async", pytest.param("sync", marks=pytest.mark.slow)])
def test_gpt_from_the_meta_device_is_the_same_for_every_number_of_stages(pools: Pools, strategy: str) -> None:
    run = Run(small_gpt, strategy, {"microbatches": 3}, dataset="tokens", samples=36, trainer={"max_epochs": 2})
    (initial,) = pools.run(1, initial_weights, replace(run, strategy="plain"))

    def schedule(optimizer: Any) -> Callable[[], None]:
        return LambdaLR(optimizer, learning_rate_factor(small_gpt(run))).step

    for stages in (1, 2, 3):
        assert_equal_weights(joined_parts(pools.run(stages, initial_weights, run)), initial)
        check(pools, run, stages, list(mini_batches_of(run, 2)), name="train_loss", after_update=schedule)
