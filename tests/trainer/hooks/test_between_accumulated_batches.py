"""A callback that changes weights after every batch, where several batches share an update.

After a batch without an update the change is part of the weights that the next update is applied to. The gradients of
the batches that follow see it where they would see it in one process: without delay at once, else one update later.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch

from lightning_asyncpp.trainer.batch_ends import after_own_update
from tests.helpers.oracle import assert_equal_weights, joined_weights
from tests.helpers.pool import Pools
from tests.helpers.projections import Draws, Projected, PutsOtherMemory, Shrinks
from tests.helpers.trainer import Net, Run, delayed, fit, train

MODULES = {"projected": Projected, "other memory": PutsOtherMemory, "shrinks": Shrinks}
ACCUMULATED = {"projected": 2, "other memory": 3, "shrinks": 2, "draws": 3}
DELAYS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # strategy, its options, those of one process
    "async": ("async", {}, {"delay": 1}),
    "sync": ("sync", {}, {"delay": 0}),
    "least": ("async", {"staleness": "least", "partition": "uniform"}, {"staleness": "least", "partition": "uniform"}),
}
BY_STAGE = ("least",)


# Over three stages: every module, and every delay; validated after every batch, or seldom.
USUAL = [
    *(("async", "projected", 1), ("async", "other memory", 7), ("sync", "projected", 1)),
    *(("async", "draws", 7), ("least", "shrinks", 1)),
]
CASES = [
    pytest.param(*case, stages, marks=[] if stages == 3 and case in USUAL else pytest.mark.slow)
    for case in itertools.product(DELAYS, ACCUMULATED, (1, 7))
    for stages in ((2, 3) if case[0] in BY_STAGE else (1, 2, 3))
]


def accumulating(module: type[Net], strategy: str, options: dict[str, Any], accumulate: int = 2, **trainer: Any) -> Run:
    run = Run(module, strategy, {"microbatches": 3} | options, dropout=0.2, val_samples=(9,), samples=56)
    return replace(run, trainer={"max_epochs": 2, "accumulate_grad_batches": accumulate} | trainer)


@pytest.mark.parametrize(("delays", "name", "interval", "stages"), CASES)
def test_every_change_means_what_it_means_in_one_process(
    pools: Pools, delays: str, name: str, interval: int, stages: int
) -> None:
    strategy, options, emulated = DELAYS[delays]
    if delays in BY_STAGE:
        emulated = emulated | {"stages": stages}
    run = accumulating({**MODULES, "draws": Draws}[name], strategy, options, ACCUMULATED[name])
    expected = train(delayed(run, microbatches=3, **emulated))["weights"]
    results = pools.run(stages, fit, replace(run, trainer=run.trainer | {"val_check_interval": interval}))
    assert_equal_weights(joined_weights(results, stages), expected)


@pytest.mark.parametrize("module", MODULES.values())
def test_without_delay_it_is_what_lightning_does(module: type[Net]) -> None:
    # An even number of batches: of a last one alone Lightning takes half the gradient.
    run = replace(accumulating(module, "plain", {}), options={}, dropout=0.0, samples=64)
    plain = train(run)["weights"]
    for name, weights in train(delayed(run, delay=0, microbatches=1))["weights"].items():
        assert weights == pytest.approx(plain[name], abs=1e-5)


class Clamps(L.Callback):
    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for parameter in module.parameters():
            parameter.clamp_(-0.2, 0.2)


def fit_clamped(run: Run, ranks: tuple[int, ...]) -> dict[str, Any]:
    """With a callback that comes after its batch's own update, on some ranks alone."""
    elsewhere = torch.distributed.is_initialized() and torch.distributed.get_rank() not in ranks
    callbacks = () if elsewhere else ((lambda: after_own_update(Clamps()), {}),)
    return fit(replace(run, callbacks=callbacks))


def test_callbacks_after_their_own_update_need_not_be_on_all_ranks(pools: Pools) -> None:
    run = accumulating(Net, "async", {})
    emulated = fit_clamped(delayed(run, delay=1, microbatches=3), (0,))["weights"]
    assert_equal_weights(joined_weights(pools.run(2, fit_clamped, run, (0, 1)), 2), emulated)
    results = pools.run(2, fit_clamped, run, (1,))  # rank 1 is the first stage, which has gradients in flight
    assert max(abs(weights).max() for weights in results[1]["weights"].values()) < 0.3
