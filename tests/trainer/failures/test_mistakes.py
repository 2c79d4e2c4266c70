"""Runs that cannot be correct are refused on every rank, before a training step ends, with a remedy."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_asyncpp.errors import ConfigurationError
from tests.helpers.cases import DIM
from tests.helpers.pool import Pools
from tests.helpers.trainer import CountsSteps, Net, Run, assert_refused, delayed, fit, refusals


class ReturnsNone(Net):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)


class CompiledInPlace(Net):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model.compile(backend="eager")


@pytest.mark.parametrize(
    ("module", "found"),
    [
        (ReturnsNone, "training_step must return a loss with one element"),
        (CompiledInPlace, "self.model was compiled as a whole"),
    ],
)
def test_a_module_that_no_pipeline_can_run_is_refused(module: Any, found: str) -> None:
    with pytest.raises(ConfigurationError, match=f"(?s){found}"):
        fit(delayed(Run(module, callbacks=((CountsSteps, {}),)), stages=2))


# -- mistakes that show on one rank only, and that all ranks must report ------------------------------------------


class CallsTwice(Net):
    """Model that is called twice in a step, which shows on only one of three stages."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + super().training_step(batch, batch_idx)


class OtherRate(Net):
    """Model whose learning rate depends on the rank."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1 * (1 + self.global_rank))


class OtherSize(Net):
    """Model with a layer of another size on one rank."""

    def configure_model(self) -> None:
        if self.global_rank == 1:
            self.model = nn.Sequential(*list(self.model)[:-1], nn.Linear(DIM, 2))


@pytest.mark.parametrize(
    ("module", "stages", "found"),
    [
        (CallsTwice, 3, "after calling self.model(...) twice"),
        (OtherRate, 2, "lr of the optimizer's parameter group 0 is 0.1 on rank 0 and 0.2 on rank 1"),
        (OtherSize, 2, "the shape of model."),
    ],
)
def test_what_differs_from_rank_to_rank_is_named_on_all(pools: Pools, module: Any, stages: int, found: str) -> None:
    assert_refused(refusals(pools, Run(module), stages), found)


OTHER: dict[str, dict[str, Any]] = {
    # message on all ranks -> options that only rank 1 gets
    "data_parallel_size is 1 on rank 0 and 2 on rank 1": {"data_parallel_size": 2},
    "state_dict_type is full on rank 0 and sharded on rank 1": {"state_dict_type": "sharded"},
    "delay is 1 on rank 0 and 0 on rank 1": {"strategy": "sync"},
}


def fit_as_told(said: str) -> None:
    told = dict(OTHER[said] if os.environ["RANK"] == "1" else {})
    run = Run(Net, told.pop("strategy", "async"), {"microbatches": 2, **told})
    fit(replace(run, callbacks=((CountsSteps, {}),)))


@pytest.mark.parametrize("said", OTHER)
def test_what_strategies_must_share(pools: Pools, said: str) -> None:
    outcomes = pools.outcomes(2, fit_as_told, said)
    assert {outcome.error for outcome in outcomes} == {"ConfigurationError"}
    assert_refused(outcomes, said, "tart all ranks with the same script, recipe and arguments")


def test_a_sample_per_replica_is_enough(pools: Pools) -> None:
    run = Run(Net, options={"data_parallel_size": 2, "microbatches": 3}, samples=2, shuffle=True)
    assert {result["global_step"] for result in pools.run(4, fit, run)} == {1}
