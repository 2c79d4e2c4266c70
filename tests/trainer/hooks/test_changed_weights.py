"""Code that changes weights after a batch or update works as in one process, whenever the pipeline drains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers.oracle import assert_equal_weights, joined_weights
from tests.helpers.pool import Pools
from tests.helpers.projections import Draws, OnSomeRanks, Projected, PutsOtherMemory, Shrinks, parameters_of, project
from tests.helpers.trainer import Net, Run, delayed, fit, staged, train


class ProjectsInTheStep(Net):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda stepped, *_: project(parameters_of(stepped)))
        return optimizer


class ProjectsBeforeValidating(Net):
    def on_validation_start(self) -> None:
        project(self.parameters())


def changing(module: type[Net], strategy: str = "async", accumulate: int = 2, **more: Any) -> Run:
    options = {"microbatches": 3, "partition": "uniform"}
    trainer = {"max_epochs": 2, "accumulate_grad_batches": accumulate}
    return Run(module, strategy, options, trainer, dropout=0.2, val_samples=(9,), samples=40, **more)


RUNS = {
    "a projection": changing(Projected, correction="feedback"),
    "where stages step ahead": changing(Shrinks, "default"),
    "between two microbatches": changing(Shrinks, "default", accumulate=1),
    "other memory": changing(PutsOtherMemory, accumulate=3, correction="prediction-ahead"),
    "random numbers": changing(Draws, "sync", accumulate=3),
    "in the step": changing(ProjectsInTheStep, accumulate=1, correction="feedback"),
    "in the step, ahead": changing(ProjectsInTheStep, "default", accumulate=1),
    "before a validation": changing(ProjectsBeforeValidating),
}


@pytest.mark.parametrize("name", RUNS)
def test_neither_stages_nor_drains_matter(name: str) -> None:
    """Weights depend neither on drains nor, unless stages step ahead, on the number of stages."""
    run, validating = RUNS[name], {"val_check_interval": 5 if name == "before a validation" else 1}
    one = train(staged(run, 3 if run.strategy == "default" else 1))
    three = train(staged(replace(run, trainer=run.trainer | validating)))
    assert_equal_weights(three["weights"], one["weights"])


@pytest.mark.parametrize(
    "name", ["a projection", "where stages step ahead", "between two microbatches", "random numbers"]
)
def test_ranks_are_as_one_process(pools: Pools, name: str) -> None:
    results = pools.run(3, fit, replace(RUNS[name], trainer=RUNS[name].trainer | {"val_check_interval": 2}))
    assert_equal_weights(joined_weights(results, 3), train(staged(RUNS[name]))["weights"])


@pytest.mark.parametrize("module", [Projected, PutsOtherMemory, Shrinks])
def test_without_delay_it_is_what_lightning_does(module: type[Net]) -> None:
    # The number of batches is even, because Lightning would halve the gradient of a single last batch.
    run = replace(changing(module, "plain"), options={}, dropout=0.0, samples=32)
    plain = train(run)["weights"]
    for name, weights in train(delayed(run, delay=0, microbatches=1))["weights"].items():
        assert weights == pytest.approx(plain[name], abs=1e-5)


def test_callbacks_after_their_own_update_need_not_be_on_all_ranks(pools: Pools) -> None:
    """Only rank 1 has the callback; it is the first stage, which has gradients in flight."""
    _, first = pools.run(2, fit, changing(OnSomeRanks))
    assert all(torch.from_numpy(weights).abs().max() < 0.3 for weights in first["weights"].values())
