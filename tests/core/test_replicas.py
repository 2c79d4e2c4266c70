"""Two replicas of two stages against the oracle, which sees their microbatches one after the other."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.helpers.cases import Case, frozen_in_front, make_model
from tests.helpers.compare import assert_same_norms, weights_of
from tests.helpers.engine import run_oracle
from tests.helpers.engine_pool import EnginePools

# The oracle adds all microbatches in one order; replicas add their own and then each other's. The sums differ in the
# last bits, about 1e-7 relative, and adamw divides by the gradient's own size, so that an element whose terms nearly
# cancel moves by up to lr * 1e-7 * (size of the terms / size of the sum) more or less per step. Weights are of order 1.
TOLERANCE = 2e-6

CASES = {
    "plain": Case(3),
    "unequal-weights": Case(3, unequal_weights=True, max_norm=0.5),
    "partial-batches": Case(4, batch_sizes=(9, 9, 5, 2), unequal_weights=True, scheduler=True),
    "error-feedback": Case(3, error_feedback=1.0, optimizer="counting", accumulate=2, max_norm=0.5),
    "skipped-step": Case(3, nan_at=2),
    "spare": Case(3, spare=True, optimizer="counting"),
    "tied": Case(3, tied=True, unequal_weights=True, max_norm=0.5, drains=(1,)),
    "routed": Case(3, routed=True, unequal_weights=True, max_norm=0.5),
    "drains": Case(3, drains=(0, 2, 3), lookahead=1),
    "least": Case(3, staleness="least", lookahead=0, unequal_weights=True, max_norm=0.5, drains=(1,), accumulate=2),
    "least-slack-tied": Case(4, staleness="least", slack=1, lookahead=1, tied=True, routed=True, max_norm=0.5),
    "least-exact": Case(3, staleness="least", slack="exact", nan_at=2, error_feedback=1.0, optimizer="counting"),
    "least-frozen": Case(3, staleness="least", model=frozen_in_front, cut=(1, 4), unequal_weights=True, max_norm=0.5),
    "synchronous": Case(2, delay=0, unequal_weights=True),
    "uneven-cut": Case(3, cut="back", unequal_weights=True, max_norm=0.5),
}


# Whose parts other cases have, and have together.
PLAINER = ("plain", "unequal-weights", "routed", "drains", "spare")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in PLAINER else []) for name in CASES]
)
def test_two_replicas_equal_the_oracle_to_rounding(engine_pools: EnginePools, name: str) -> None:
    case = dataclasses.replace(CASES[name], data_parallel_size=2)
    results = engine_pools.run(case, 2)
    expected, losses = run_oracle(case, num_stages=2)
    for replica in (0, 1):
        weights = weights_of(results, replica)
        assert sorted(weights) == sorted(expected)
        for parameter, value in expected.items():
            np.testing.assert_allclose(weights[parameter], value.numpy(), rtol=0, atol=TOLERANCE, err_msg=parameter)
    assert_same_norms(results)
    if case.nan_at is None and not case.unequal_weights:
        means = np.mean([result["losses"] for result in results if result["losses"]], axis=0)
        assert means == pytest.approx(losses, rel=1e-5)


def test_replicas_hold_the_same_bits(engine_pools: EnginePools) -> None:
    results = engine_pools.run(Case(3, data_parallel_size=2, unequal_weights=True, max_norm=0.5, error_feedback=1.0), 2)
    first, second = weights_of(results, 0), weights_of(results, 1)
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_an_unused_parameter_has_no_gradient_on_any_replica(engine_pools: EnginePools) -> None:
    """adamw decays what has a gradient, be it zero; and one that one replica alone uses is trained on both."""
    results = engine_pools.run(Case(3, data_parallel_size=2, spare=True), 2)
    before = dict(make_model(spare=True).named_parameters())
    never, sometimes = (next(name for name in before if name.endswith(end)) for end in ("never", "sometimes"))
    for replica in (0, 1):
        weights = weights_of(results, replica)
        assert np.array_equal(weights[never], before[never].detach().numpy())
        assert not np.array_equal(weights[sometimes], before[sometimes].detach().numpy())


def test_equal_batches_on_both_replicas_give_the_run_of_one(engine_pools: EnginePools) -> None:
    """g + g over w + w is g over w exactly, powers of two."""
    one = Case(3, max_norm=0.5, scheduler=True, error_feedback=1.0, same_data=True)
    alone = weights_of(engine_pools.run(one, 2))
    together = weights_of(engine_pools.run(dataclasses.replace(one, data_parallel_size=2), 2))
    assert all(np.array_equal(alone[name], together[name]) for name in alone)


@pytest.mark.parametrize("options", [{"dropout": 0.3}, {"random_input": True}], ids=["layers", "user code"])
def test_replicas_draw_their_own_random_numbers(engine_pools: EnginePools, options: dict[str, Any]) -> None:
    """With the same numbers, equal batches on both would again give the run of one."""
    one = Case(3, same_data=True, **options)
    alone = weights_of(engine_pools.run(one, 2))
    together = weights_of(engine_pools.run(dataclasses.replace(one, data_parallel_size=2), 2))
    assert not all(np.array_equal(alone[name], together[name]) for name in alone)
