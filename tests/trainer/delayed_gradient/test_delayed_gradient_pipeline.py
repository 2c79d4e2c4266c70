"""Emulated delays in micro-batches: bitwise the oracle and the pipeline, with every optimizer and correction."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.trainer.delayed_gradient.delays import delayed, train
from tests.trainer.pool import Pools
from tests.trainer.reference import assert_equal_weights, joined_weights, mini_batches_of, oracle
from tests.trainer.runs import CORRECTIONS, Net, Run, fit

STALENESS = {False: "uniform", True: "fresh_last_stage"}


@pytest.mark.parametrize("error_feedback", [False, True])
@pytest.mark.parametrize("delay", [0, 1])
def test_in_micro_batches_it_is_bitwise_the_oracle(delay: int, error_feedback: bool) -> None:
    run = Run(
        Net, optimizer="muon", error_feedback=error_feedback, scheduler="decay-step", dropout=0.2, samples=37,
        trainer={"max_epochs": 2, "gradient_clip_val": 0.4, "accumulate_grad_batches": 2},
    )  # fmt: skip
    emulated = train(delayed(run, delay=delay, micro_batches=3))
    batches = list(mini_batches_of(run, 2, accumulate=2))
    weights, losses = oracle(replace(run, strategy="sync" if delay == 0 else "async"), 3, batches, max_norm=0.4)
    assert_equal_weights(emulated["weights"], weights)
    logged = [metrics["train_loss_step"] for _, metrics in emulated["records"] if "train_loss_step" in metrics]
    assert len(logged) == len(losses)


@pytest.mark.parametrize(
    ("stages", "precision"),
    [
        pytest.param(1, "32-true", marks=pytest.mark.slow),
        (2, "32-true"),
        (2, "bf16-mixed"),
        pytest.param(2, "bf16-true", marks=pytest.mark.slow),
    ],
)
def test_in_micro_batches_it_is_bitwise_the_pipeline(pools: Pools, stages: int, precision: str) -> None:
    run = Run(
        Net, "async", {"micro_batches": 4}, optimizer="muon", error_feedback=True, scheduler="decay-step",
        dropout=0.2, shuffle=True, samples=37, val_samples=(9,),
        trainer={"max_epochs": 2, "gradient_clip_val": 0.4, "precision": precision, "logger": "list"},
    )  # fmt: skip
    pipeline = pools.run(stages, fit, run)
    emulated = train(delayed(run, delay=1, micro_batches=4))
    assert_equal_weights(emulated["weights"], joined_weights(pipeline, stages))
    assert emulated["rates"] == pipeline[0]["rates"]

    def losses(records: list[Any]) -> dict[int, float]:
        return {step: m["train_loss_step"] for step, m in records if "train_loss_step" in m}

    assert losses(emulated["records"]) == pytest.approx(losses(pipeline[0]["records"]), rel=1e-6)
    for name, value in pipeline[0]["callback_metrics"].items():
        assert emulated["callback_metrics"][name] == pytest.approx(value, rel=1e-2 if "bf16" in precision else 1e-5)


# Those whose step depends on more than a gradient and its own moments; adamw and muon have other tests, too.
@pytest.mark.parametrize("optimizer", ["soap", pytest.param("normuon", marks=pytest.mark.slow)])
def test_every_optimizer_steps_in_the_pipeline_as_here(pools: Pools, optimizer: str) -> None:
    check_against_the_pipeline(pools, Run(Net, optimizer=optimizer, error_feedback=True))


ALIKE = ("feedback-2", "prediction")  # with other numbers


@pytest.mark.parametrize(
    "correction", [pytest.param(name, marks=[pytest.mark.slow] if name in ALIKE else []) for name in CORRECTIONS]
)
def test_every_correction_acts_in_the_pipeline_as_here(pools: Pools, correction: str) -> None:
    check_against_the_pipeline(pools, Run(Net, optimizer="muon", correction=correction))


@pytest.mark.parametrize(
    ("stages", "correction", "partition"),
    [
        pytest.param(2, "feedback", "auto", marks=pytest.mark.slow),
        (3, "feedback", "uniform"),
        (2, "prediction-ahead", [8, 1]),
    ],
)
def test_a_fresh_last_stage_trains_in_the_pipeline_as_here(
    pools: Pools, stages: int, correction: str, partition: Any
) -> None:
    options = {"micro_batches": 3, "staleness": "fresh_last_stage", "partition": partition}
    run = Run(
        Net, "async", options, optimizer="muon", correction=correction,
        scheduler="decay-step", dropout=0.2, shuffle=True, samples=37, val_samples=(9,),
        trainer={"max_epochs": 2, "gradient_clip_val": 0.4, "val_check_interval": 2, "logger": "list"},
    )  # fmt: skip
    pipeline = pools.run(stages, fit, run)
    ways = {"delay": "fresh_last_stage", "stages": stages, "micro_batches": 3}
    emulated = train(delayed(run, **ways, partition=partition))
    assert_equal_weights(emulated["weights"], joined_weights(pipeline, stages))
    elsewhere = [1, 8] if stages == 2 else [2, 1, 6]
    for other in (delayed(run, delay=1, micro_batches=3), delayed(run, **ways, partition=elsewhere)):
        assert not np.array_equal(train(other)["weights"]["model.0.weight"], emulated["weights"]["model.0.weight"])
    assert emulated["callback_metrics"]["val_loss"] == pytest.approx(pipeline[0]["callback_metrics"]["val_loss"])


@pytest.mark.parametrize(
    ("stages", "correction", "slack", "more"),
    [
        (3, "prediction-ahead", "exact", {"accumulate_grad_batches": 2}),
        pytest.param(3, "feedback", 0, {"accumulate_grad_batches": 2}, marks=pytest.mark.slow),
        pytest.param(2, "feedback", 1, {}, marks=pytest.mark.slow),
        pytest.param(2, "feedback", "exact", {"accumulate_grad_batches": 2}, marks=pytest.mark.slow),
        pytest.param(3, "prediction-ahead", 1, {}, marks=pytest.mark.slow),
    ],
)
def test_the_least_staleness_trains_in_the_pipeline_as_here(
    pools: Pools, stages: int, correction: str, slack: Any, more: dict[str, Any]
) -> None:
    options = {"micro_batches": 4, "staleness": "least", "slack": slack, "partition": "uniform"}
    run = Run(
        Net, "async", options, optimizer="muon", correction=correction,
        scheduler="decay-step", dropout=0.2, shuffle=True, samples=69, val_samples=(9,),
        trainer={"max_epochs": 2, "gradient_clip_val": 0.4, "val_check_interval": 3, "logger": "list"} | more,
    )  # fmt: skip
    pipeline = pools.run(stages, fit, run)
    ways = {"delay": "least", "stages": stages, "micro_batches": 4, "partition": "uniform"}
    emulated = train(delayed(run, **ways, slack=slack))
    assert_equal_weights(emulated["weights"], joined_weights(pipeline, stages))
    others = ({"delay": 1, "micro_batches": 4}, ways | {"slack": 3}, ways | {"slack": slack, "lookahead": 1})
    for other in others:
        weights = train(delayed(run, **other))["weights"]
        assert not np.array_equal(weights["model.0.weight"], emulated["weights"]["model.0.weight"])
    assert emulated["callback_metrics"]["val_loss"] == pytest.approx(pipeline[0]["callback_metrics"]["val_loss"])


@pytest.mark.parametrize(
    ("stages", "correction", "fresh"),
    [(2, "feedback", True), pytest.param(3, "feedback", False, marks=pytest.mark.slow), (2, "prediction-ahead", False)],
)
def test_a_synchronous_start_trains_in_the_pipeline_as_here(
    pools: Pools, stages: int, correction: str, fresh: bool
) -> None:
    run = Run(
        Net, "async", {"micro_batches": 3, "synchronous_start": 3, "staleness": STALENESS[fresh]}, optimizer="muon",
        correction=correction, scheduler="decay-step", dropout=0.2, shuffle=True, samples=37, val_samples=(9,),
        trainer={"max_epochs": 2, "gradient_clip_val": 0.4, "val_check_interval": 2, "logger": "list"},
    )  # fmt: skip
    pipeline = pools.run(stages, fit, run)
    ways: dict[str, Any] = {"delay": "fresh_last_stage", "stages": stages} if fresh else {"delay": 1}
    emulated = train(delayed(run, **ways, micro_batches=3, synchronous_start=3))
    assert_equal_weights(emulated["weights"], joined_weights(pipeline, stages))
    other = train(delayed(run, **ways, micro_batches=3, synchronous_start=2))
    assert not np.array_equal(other["weights"]["model.0.weight"], emulated["weights"]["model.0.weight"])
    assert emulated["callback_metrics"]["val_loss"] == pytest.approx(pipeline[0]["callback_metrics"]["val_loss"])


def test_looking_ahead_acts_without_a_delay_as_in_the_synchronous_pipeline(pools: Pools) -> None:
    run = Run(Net, "sync", {"micro_batches": 3}, optimizer="muon", correction="prediction-ahead")
    pipeline = pools.run(2, fit, run)
    emulated = train(delayed(run, delay=0, micro_batches=3))
    assert_equal_weights(emulated["weights"], joined_weights(pipeline, 2))
    alone = train(delayed(replace(run, correction=""), delay=0, micro_batches=3))
    assert not np.array_equal(alone["weights"]["model.0.weight"], emulated["weights"]["model.0.weight"])


def check_against_the_pipeline(pools: Pools, run: Run) -> None:
    """Bitwise, with everything that an optimizer may notice."""
    run = replace(
        run, strategy="async", options={"micro_batches": 3}, scheduler="decay-step", samples=60,
        trainer={"gradient_clip_val": 0.4},
    )  # fmt: skip
    pipeline = pools.run(3, fit, run)
    emulated = train(delayed(run, delay=1, micro_batches=3))
    assert_equal_weights(emulated["weights"], joined_weights(pipeline, 3))


@pytest.mark.parametrize("correction", ["feedback", "prediction"])
def test_skipped_updates_agree_with_the_pipeline(pools: Pools, correction: str) -> None:
    options = {"micro_batches": 2, "nonfinite_gradients": "skip"}
    run = Run(NanNet, "async", options, optimizer="muon", correction=correction)
    pipeline = pools.run(2, fit, run)
    emulated = train(delayed(run, **options))
    assert_equal_weights(emulated["weights"], joined_weights(pipeline, 2))


class NanNet(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if batch_idx == 2 else loss
