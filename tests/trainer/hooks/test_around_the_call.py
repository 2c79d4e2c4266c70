"""What a step sets around ``self.model(...)`` holds on all stages, or is refused on all ranks before an update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch.nn.attention import SDPBackend

from tests.trainer.delayed_gradient.delays import delayed
from tests.trainer.failures.mistakes import CountsSteps
from tests.trainer.hooks import around, crossing
from tests.trainer.idioms.steps import PairsHooks
from tests.trainer.pool import Pools, impatient
from tests.trainer.reference import assert_equal_weights, joined_weights
from tests.trainer.runs import Run, evaluate, fit, fit_and_hear


class OtherBackend(around.SetsAll):
    backend = SDPBackend.FLASH_ATTENTION


@pytest.mark.parametrize("stages", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_autocast_and_attention_by_micro_batch(pools: Pools, stages: int) -> None:
    """Also where layers recompute their activations, and in validations."""
    run = Run(around.SetsAll, options={"micro_batches": 4, "partition": [2, 4] if stages == 2 else [1, 2, 3]},
              samples=48, val_samples=(9,))  # fmt: skip
    results = pools.run(stages, fit, run)
    (expected,) = pools.run(1, fit, delayed(run, micro_batches=4))
    assert_equal_weights(expected["weights"], joined_weights(results, stages))
    assert results[0]["callback_metrics"]["val_loss"] == pytest.approx(expected["callback_metrics"]["val_loss"], 1e-6)
    (other,) = pools.run(1, fit, delayed(replace(run, module=OtherBackend), micro_batches=4))
    assert not np.array_equal(other["weights"]["model.0.out.weight"], expected["weights"]["model.0.out.weight"])


def test_what_layers_set_for_good_is_not_the_steps(pools: Pools) -> None:
    run = Run(around.LayersSetForGood, options={"micro_batches": 3, "partition": [2, 3]})
    results = pools.run(2, fit, run)
    (expected,) = pools.run(1, fit, delayed(run, micro_batches=3))
    assert_equal_weights(expected["weights"], joined_weights(results, 2))


def test_predictions(pools: Pools) -> None:
    run = Run(around.SetsAll, options={"micro_batches": 3})
    results = pools.run(3, evaluate, run, "predict")
    (expected,) = pools.run(1, evaluate, delayed(run, micro_batches=3), "predict")
    for mine, theirs in zip(results[0]["returned"], expected["returned"], strict=True):
        assert np.array_equal(mine, theirs)


def test_without_the_trainers_precision(pools: Pools) -> None:
    run = Run(around.InFullPrecision, options={"micro_batches": 3}, trainer={"precision": "bf16-mixed"})
    results = pools.run(3, fit, run)
    (expected,) = pools.run(1, fit, delayed(run, micro_batches=3))
    assert_equal_weights(expected["weights"], joined_weights(results, 3))


def test_many_tensors_cross_a_cut(pools: Pools) -> None:
    """21 and 41, with more than a kilobyte of names around them."""
    run = Run(crossing.UNet, options={"micro_batches": 3, "partition": [1, 1, 3]})
    results = pools.run(3, fit, run)
    (expected,) = pools.run(1, fit, delayed(run, micro_batches=3))
    assert_equal_weights(expected["weights"], joined_weights(results, 3))


def test_complex_numbers_cross_a_cut(pools: Pools) -> None:
    """With their gradients, and what torch has only noted of them: that they are conjugated, or negative."""
    run = Run(crossing.Complex, options={"micro_batches": 2, "partition": [3, 1]})
    results = pools.run(2, fit, run)
    (expected,) = pools.run(1, fit, delayed(run, micro_batches=2))
    assert_equal_weights(expected["weights"], joined_weights(results, 2))


def test_gradients_of_the_output_are_there(pools: Pools) -> None:
    run = Run(around.Penalises, options={"micro_batches": 2})
    results = pools.run(2, fit, run)
    (expected,) = pools.run(1, fit, delayed(run, micro_batches=2))
    assert_equal_weights(expected["weights"], joined_weights(results, 2))


@pytest.mark.parametrize(("module", "says", "stages"), around.REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_refused(pools: Pools, module: Any, says: str, stages: int) -> None:
    options = {"partition": [2, 1]} if module is crossing.Codes else {}
    outcomes = pools.outcomes(stages, fit, Run(module, options=options, callbacks=((CountsSteps, {}),)))
    for outcome in outcomes:
        assert outcome.error == "ConfigurationError", outcome.trace
        assert says in outcome.message


# A run that is refused midway takes its processes with it, which costs seconds.
USUAL = (around.SetsAttributesOfAllLayers, around.SetsAttributesAfterwards, around.RunningMean)


@pytest.mark.parametrize(
    ("module", "says", "stages"),
    [pytest.param(*case, marks=[] if case[0] in USUAL else [pytest.mark.slow]) for case in around.REFUSED_LATER],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_refused_when_it_makes_a_difference(pools: Pools, module: Any, says: str, stages: int) -> None:
    run = Run(module, dropout=0.1, options={"micro_batches": 4})
    outcomes = pools.outcomes(stages, impatient, fit, run)
    assert all(outcome.error for outcome in outcomes), "every rank ends"
    assert any(outcome.error == "ConfigurationError" and says in outcome.message for outcome in outcomes), outcomes


@pytest.mark.parametrize("module", [around.SetsAttributesInAHook, around.CountsBefore])
def test_what_every_stage_does_is_right(pools: Pools, module: Any) -> None:
    run = Run(module, dropout=0.1, options={"micro_batches": 4})
    results = pools.run(3, fit, run)
    (expected,) = pools.run(1, fit, delayed(run, micro_batches=4))
    assert_equal_weights(expected["weights"], joined_weights(results, 3))


def test_a_mode_set_in_a_validation(pools: Pools) -> None:
    run = Run(around.TrainsInTheValidation, val_samples=(8,), trainer={"num_sanity_val_steps": 1})
    outcomes = pools.outcomes(3, fit, run)
    assert all(outcome.error for outcome in outcomes)
    assert "train() or eval() on self.model" in outcomes[0].message


def test_what_layers_keep_for_the_step_is_warned_of(pools: Pools) -> None:
    for stages, partition in ((2, [3, 3]), (3, [1, 2, 3])):
        heard = pools.run(
            stages, fit_and_hear, Run(crossing.SumsBalances, options={"partition": partition}), "kept, with a gradient"
        )[::-1]
        named = [" ".join(texts).split(":")[0] for _, texts in heard]  # the first stage's first
        assert ", ".join(named[:-1]) == "features, model.1.balance"
        assert named[-1] == ""


@pytest.mark.parametrize("module", [crossing.KeepsForItsBackward, PairsHooks])
def test_what_forwards_keep_for_backward_hooks_is_warned_of_but_for_queues(pools: Pools, module: Any) -> None:
    heard = [texts for _, texts in pools.run(2, fit_and_hear, Run(module), "full backward hook")]
    assert heard[0] == []  # the last stage, where every forward is followed by its backward
    assert ["model.0.kept" in text for text in heard[1]] == [True] * (module is crossing.KeepsForItsBackward)
