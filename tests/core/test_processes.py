"""The engine over processes and replicas computes what the oracle computes; all options stand in `test_engine.py`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.helpers.cases import Case, frozen_in_front, make, make_model
from tests.helpers.engine import assert_equals_oracle, assert_same_norms, check_random_case, run_oracle, weights_of
from tests.helpers.pool import EnginePools

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler")

CASES = {
    "all at once": Case(3, optimizer="muon", error_feedback=1.0, max_norm=0.3, scheduler=True, unequal_weights=True),
    "accumulated": Case(5, accumulate=2, dropout=0.3, batch_sizes=(9, 9, 5, 2), drains=(1,), evaluates=(2,)),
    "tied and routed": Case(4, tied=True, routed=True, resumes=(2,), checkpointing=True),
    "least, slack": Case(4, staleness="least", slack=1, lookahead=1, tied=True, max_norm=0.5, drains=(2,)),
    "least, exact": Case(4, staleness="least", slack="exact", nan_at=2, batch_sizes=(6, 6, 6, 0, 6)),
    "masters": Case(4, bf16=True, error_feedback=0.5, optimizer="counting"),
}


@pytest.mark.parametrize("name", CASES)
def test_three_stages(engine_pools: EnginePools, name: str) -> None:
    assert_equals_oracle(engine_pools.run(CASES[name], 3), CASES[name], 3)


def test_the_cut_is_the_one_that_was_asked_for(engine_pools: EnginePools) -> None:
    case = Case(2, cut="back", batch_sizes=(4, 4))
    assert case.counts(2) == [1, 8]
    last, first = engine_pools.run(case, 2)
    layers = {int(name.partition(".")[0]) for name in first["weights"]}
    assert max(layers) < 1 <= min(int(name.partition(".")[0]) for name in last["weights"])


@pytest.mark.parametrize("seed", [pytest.param(k, marks=[] if k < 8 else pytest.mark.slow) for k in range(60)])
def test_random_case(engine_pools: EnginePools, seed: int) -> None:
    """With layers, replicas, drains, evaluations and resumes wherever they fall."""
    check_random_case(engine_pools, seed)


# The oracle adds all microbatches in one order; replicas add their own and then each other's. The sums differ in the
# last bits, about 1e-7 relative, and adamw divides by the gradient's own size, so that an element whose terms nearly
# cancel moves by up to lr * 1e-7 * (size of the terms / size of the sum) more or less per step. Weights are of order 1.
TOLERANCE = 2e-6

REPLICAS = {
    "partial batches": Case(4, batch_sizes=(9, 9, 5, 2), unequal_weights=True, scheduler=True),
    "error feedback": Case(3, error_feedback=1.0, optimizer="counting", accumulate=2, max_norm=0.5),
    "skipped step": Case(3, nan_at=2),
    "tied": Case(3, tied=True, unequal_weights=True, max_norm=0.5, drains=(1,)),
    "least": Case(3, staleness="least", lookahead=0, unequal_weights=True, max_norm=0.5, drains=(1,), accumulate=2),
    "least, slack, tied": Case(4, staleness="least", slack=1, lookahead=1, tied=True, routed=True, max_norm=0.5),
    "least, frozen": Case(3, staleness="least", model=frozen_in_front, cut=(1, 4), unequal_weights=True, max_norm=0.5),
    "synchronous": Case(2, delay=0, unequal_weights=True),
}


def assert_copies_are_the_same(results: list[dict[str, Any]]) -> None:
    first, second = weights_of(results, 0), weights_of(results, 1)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert all(np.array_equal(np.asarray(c), first[name]) for r in results for name, c in r["copies"].items())
    assert_same_norms(results)


@pytest.mark.parametrize("name", REPLICAS)
def test_two_replicas_equal_the_oracle_to_rounding(engine_pools: EnginePools, name: str) -> None:
    """And each other bitwise."""
    case = replace(REPLICAS[name], data_parallel_size=2)
    results = engine_pools.run(case, 2)
    assert_copies_are_the_same(results)
    expected, losses = run_oracle(case, num_stages=2)
    found = weights_of(results)
    assert sorted(found) == sorted(expected)
    for parameter, value in expected.items():
        np.testing.assert_allclose(found[parameter], value.numpy(), rtol=0, atol=TOLERANCE, err_msg=parameter)
    if case.nan_at is None and not case.unequal_weights:
        means = np.mean([result["losses"] for result in results if result["losses"]], axis=0)
        assert means == pytest.approx(losses, rel=1e-5)


def test_three_stages_and_two_replicas_share_a_weight(engine_pools: EnginePools) -> None:
    """To rounding: replicas add a stage's uses before they reduce."""
    kinds = ("linear", "projection", "as first", "as first", "experts", "as first", "as first")
    model = partial(make, tuple((kind, "tensor") for kind in kinds))
    case = Case(3, model=model, cut=(2, 2, 4), data_parallel_size=2, max_norm=0.3, optimizer="counting")
    results = engine_pools.run(case, 3)
    assert_copies_are_the_same(results)
    found = weights_of(results)
    for name, value in run_oracle(case)[0].items():
        np.testing.assert_allclose(found[name], value.numpy(), rtol=0, atol=1e-5)


def test_an_unused_parameter_has_no_gradient_on_any_replica(engine_pools: EnginePools) -> None:
    """adamw decays what has a gradient, be it zero; and one that one replica alone uses is trained on both."""
    results = engine_pools.run(Case(3, data_parallel_size=2, spare=True), 2)
    before = dict(make_model(spare=True).named_parameters())
    never, sometimes = (next(name for name in before if name.endswith(end)) for end in ("never", "sometimes"))
    for replica in (0, 1):
        weights = weights_of(results, replica)
        assert np.array_equal(weights[never], before[never].detach().numpy())
        assert not np.array_equal(weights[sometimes], before[sometimes].detach().numpy())


@pytest.mark.parametrize("options", [{"dropout": 0.3}, {"random_input": True}], ids=["layers", "user code"])
def test_replicas_draw_their_own_random_numbers(engine_pools: EnginePools, options: dict[str, Any]) -> None:
    """With the same numbers, equal batches on both would give the run of one, as they do without any."""
    same = {}
    for name, more in (("plain", {}), ("random", options)):
        one = Case(3, max_norm=0.5, scheduler=True, error_feedback=1.0, same_data=True, **more)
        alone = weights_of(engine_pools.run(one, 2))
        together = weights_of(engine_pools.run(replace(one, data_parallel_size=2), 2))
        same[name] = all(np.array_equal(alone[name], together[name]) for name in alone)
    assert same == {"plain": True, "random": False}
