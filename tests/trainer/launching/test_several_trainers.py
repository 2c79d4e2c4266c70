"""One module under several Trainers, one after the other, as in plain Lightning."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import lightning as L
import numpy as np

from lightning_asyncpp.trainer.step_log import EPOCH_ENDS
from tests.helpers.oracle import assert_equal_weights, joined_weights
from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, arrays, fit, loader, make_trainer, val_loaders


class Averages(L.Callback):
    """Keeps a mean of the weights in a copy of the module, as users write it."""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.mean = copy.deepcopy(module)

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        for mean, parameter in zip(self.mean.parameters(), module.parameters()):
            mean.data.lerp_(parameter.data, 0.5)


RUN = Run(Net, optimizer="muon", error_feedback=True, samples=24, val_samples=(16,), options={"microbatches": 3})


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
    outcomes = pools.outcomes(2, other_number_of_stages, replace(RUN, options={"microbatches": 2}))
    assert [outcome.error for outcome in outcomes] == ["ConfigurationError"] * 2
    assert all("cut for 2 stages and cannot be cut for 1" in outcome.message for outcome in outcomes)


def other_number_of_stages(run: Run) -> None:
    """Two stages, then two replicas of one stage."""
    module = run.module(run)
    make_trainer(run).fit(module, loader(run))
    make_trainer(replace(run, options={**run.options, "data_parallel_size": 2})).fit(module, loader(run))


def train_with_a_mean(run: Run) -> dict[str, Any]:
    """What a copy of the module holds, made while it trains, and whether its methods are its own."""
    averages = Averages()
    L.seed_everything(run.seed, verbose=False)
    module = run.module(run)
    make_trainer(run, callbacks=[averages]).fit(module, loader(run))
    methods = [getattr(averages.mean, name) for name in ("log", *EPOCH_ENDS)]
    return {
        "weights": arrays(dict(module.named_parameters())),
        "mean": arrays(dict(averages.mean.named_parameters())),
        "own": all(m.__self__ is averages.mean and m.__func__ is getattr(Net, m.__name__) for m in methods),
    }


def test_a_copy_of_the_module_is_a_plain_one(pools: Pools) -> None:
    (whole,) = pools.run(1, train_with_a_mean, RUN)
    results = pools.run(2, train_with_a_mean, RUN)
    assert_equal_weights(joined_weights(results, 2), joined_weights(pools.run(2, fit, RUN), 2))
    assert all(result["own"] for result in results)
    for result in results:
        assert result["mean"].keys() == result["weights"].keys()
        assert all(not np.array_equal(result["mean"][name], result["weights"][name]) for name in result["mean"])
    assert whole["own"]
