"""What others do around a model, with several replicas of every stage: as ``delayed_gradient`` trains it under DDP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.trainer.failures.mistakes import CountsSteps
from tests.trainer.hooks import around
from tests.trainer.hooks.test_around_an_update import Projected, PutsOtherMemory, StepsSometimes, ZeroesInPlace
from tests.trainer.pool import Pools
from tests.trainer.reference import assert_equal_weights
from tests.trainer.runs import Net, Run, delayed, fit
from tests.trainer.test_gradients_of_users import ClipsByTorch
from tests.trainer.test_other_optimizers import Filtered, Grouped, SparseFirst
from tests.trainer.test_second_names import SecondNet, UsedBetweenNet, UsesDirectly

REPLICAS = 2

TRAINED: dict[str, tuple[type[Any], dict[str, Any], dict[str, Any]]] = {
    # module, options of the run, of the strategy
    "second names": (SecondNet, {"batch_size": 8, "optimizer": "sgd"}, {}),
    "a second name that layers use": (UsedBetweenNet, {}, {"partition": [4, 1]}),
    "around the call": (around.SetsAll, {}, {"partition": [2, 4]}),
    "nothing to train": (Filtered, {"optimizer": "muon"}, {}),
    "groups": (Grouped, {}, {}),
    "projection": (Projected, {"correction": "feedback"}, {}),
    "other memory": (PutsOtherMemory, {}, {}),
    "a step now and then": (StepsSometimes, {"dropout": 0.2}, {}),
    "zeroes in place": (ZeroesInPlace, {}, {}),
}
# Stages that share a weight add what each has reduced over the replicas; the emulator's replicas add first.
TO_ROUNDING = ("second names",)
ALIKE = ("second names", "groups", "other memory", "zeroes in place", "sparse")
"""Which others show by default: as much is done with them in the replicas' gradients, and is refused as early."""


def all_of(cases: dict[str, Any]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.slow] if name in ALIKE else []) for name in cases]


@pytest.mark.parametrize("name", all_of(TRAINED))
def test_trains_as_the_emulator_under_ddp(pools: Pools, name: str) -> None:
    module, of_run, options = TRAINED[name]
    # Six updates; three an epoch where the batches are larger.
    trainer = {
        "max_epochs": of_run.get("batch_size", 4) // 4,
        "gradient_clip_val": 0.4,
        "use_distributed_sampler": True,
    }
    run = Run(module, "async", {"micro_batches": 2}, trainer=trainer, samples=48, **{"batch_size": 4} | of_run)
    emulated = pools.run(REPLICAS, fit, delayed(run, micro_batches=2))
    options = run.options | {"data_parallel_size": REPLICAS} | options
    results = pools.run(2 * REPLICAS, fit, replace(run, options=options))
    expected = emulated[0]["weights"]
    held = [key for result in results for key in result["weights"]]  # two stages may share one
    assert all(held.count(key) >= REPLICAS for key in expected)
    for result in results:
        if name in TO_ROUNDING:
            for key, weights in result["weights"].items():
                np.testing.assert_allclose(weights, expected[key], rtol=0, atol=1e-6)
        else:
            assert_equal_weights(result["weights"], {key: expected[key] for key in result["weights"]})


REFUSED: dict[str, tuple[type[Net], str]] = {
    "sparse": (SparseFirst, "make them dense (layers: sparse=False)"),
    "clips by torch": (ClipsByTorch, "clip_grad_norm_"),
    "used directly": (UsesDirectly, "used directly in training_step"),
}


@pytest.mark.parametrize("name", all_of(REFUSED))
def test_is_refused_on_every_rank(pools: Pools, name: str) -> None:
    module, said = REFUSED[name]
    run = Run(module, "async", {"micro_batches": 2, "data_parallel_size": REPLICAS}, samples=48, batch_size=4)
    counts = () if module is ClipsByTorch else ((CountsSteps, {}),)  # it clips where the first update is due
    outcomes = pools.outcomes(2 * REPLICAS, fit, replace(run, callbacks=counts))
    assert all(outcome.error for outcome in outcomes)
    assert any(said in outcome.message for outcome in outcomes)
