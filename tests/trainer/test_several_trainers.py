"""One module under several Trainers, one after the other, as in plain Lightning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning as L
import numpy as np

from tests.trainer.pool import Pools
from tests.trainer.runs import Net, Run, arrays, loader, make_trainer, val_loaders

RUN = Run(Net, optimizer="muon", error_feedback=True, samples=24, val_samples=(16,), options={"micro_batches": 3})


def train_twice_and_validate(run: Run) -> dict[str, Any]:
    """Two trainings and a validation, each by a Trainer of its own, on the same module."""
    L.seed_everything(run.seed, verbose=False)
    module = run.module(run)
    make_trainer(run).fit(module, loader(run))
    second = make_trainer(run)
    second.fit(module, loader(run))
    full = arrays(second.strategy.full_state_dict())
    return {"weights": full, "losses": make_trainer(run).validate(module, val_loaders(run), verbose=False)}


def test_the_next_trainer_goes_on_where_the_last_one_stopped(pools: Pools) -> None:
    (expected,) = pools.outcomes(1, train_twice_and_validate, RUN)
    ranks = pools.outcomes(3, train_twice_and_validate, RUN)
    assert [expected.error, *(rank.error for rank in ranks)] == [""] * 4
    weights = ranks[0].value["weights"]
    assert weights.keys() == expected.value["weights"].keys()
    for name, array in expected.value["weights"].items():
        np.testing.assert_array_equal(weights[name], array, err_msg=name)
    assert all(rank.value["losses"] == expected.value["losses"] for rank in ranks)


def test_a_trainer_with_fewer_stages_is_refused(pools: Pools) -> None:
    outcomes = pools.outcomes(2, other_number_of_stages, replace(RUN, options={"micro_batches": 2}))
    assert [outcome.error for outcome in outcomes] == ["ConfigurationError"] * 2
    assert all("cut for 2 stages and cannot be cut for 1" in outcome.message for outcome in outcomes)


def other_number_of_stages(run: Run) -> None:
    """Two stages, then two replicas of one stage."""
    module = run.module(run)
    make_trainer(run).fit(module, loader(run))
    make_trainer(replace(run, options={**run.options, "data_parallel_size": 2})).fit(module, loader(run))
