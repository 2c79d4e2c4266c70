"""In processes the engine equals the oracle bitwise; replicas equal it up to rounding, and each other bitwise."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.helpers.cases import Case, frozen_in_front, make
from tests.helpers.engine import (
    assert_ranks_agree,
    assert_same_losses,
    assert_same_weights,
    check_random_case,
    run_oracle,
    weights_of,
)
from tests.helpers.pool import EnginePools

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler")

# The oracle adds all microbatches in one order; each replica adds its own, then replicas add their sums. So sums differ
# in the last bits, by about 1e-7 relative. adamw divides by the gradient's size; so an element whose terms nearly
# cancel moves by up to lr * 1e-7 * (size of the terms / size of the sum) more or less per step. Weights are of order 1.
TOLERANCE = 2e-6

SHARED_BY_ALL = partial(
    make, tuple((k, "tensor") for k in ("linear", "projection", "as first", "as first", "experts", "as first"))
)
ONE_REPLICA = {
    "clipped feedback of muon": (
        3, Case(7, lookahead=2, max_norm=0.3, scheduler=True, error_feedback=1.0, optimizer="muon"),
    ),
    "accumulated, partial, with dropout": (
        4,
        Case(
            5, batch_sizes=(8, 5, 2, 1), unequal_weights=True, accumulate=2, dropout=0.3, random_input=True,
            checkpointing=True, drains=(1,),
        ),
    ),
    "tied and routed, drained, resumed": (
        3,
        Case(5, tied=True, routed=True, max_norm=0.3, optimizer="muon", drains=(0, 2), evaluates=(1,), resumes=(2, 3)),
    ),
    "stages step ahead": (4, Case(6, staleness="least", slack=1, start=2, max_norm=0.3, drains=(1,))),
    "stages wait for the exact norm": (3, Case(5, staleness="least", slack="exact", max_norm=0.3, nan_at=2)),
    "bf16, shared by three stages": (3, Case(4, model=SHARED_BY_ALL, cut=(2, 2, 3), bf16=True, checkpointing=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_REPLICA)
def test_stages_in_processes_equal_the_oracle(engine_pools: EnginePools, name: str) -> None:
    num_stages, case = ONE_REPLICA[name]
    results = engine_pools.run(case, num_stages)
    weights, losses = run_oracle(case, num_stages)
    assert_same_weights(results, weights)
    assert_same_losses(results, losses)
    assert_ranks_agree(results)


# All of these cases have replicas; core/test_engine.py runs the random cases with one replica.
WITH_REPLICAS = (5, 6, 13, 14, 23, 28, 29, 30, 32, 36, 37, 42, 45, 46, 49, 52, 55)


@pytest.mark.parametrize("seed", [pytest.param(k, marks=[] if k < 14 else pytest.mark.slow) for k in WITH_REPLICAS])
def test_random_case(engine_pools: EnginePools, seed: int) -> None:
    check_random_case(engine_pools, seed)


REPLICAS = {
    "partial-batches": Case(4, batch_sizes=(9, 9, 5, 2), unequal_weights=True, scheduler=True),
    "error-feedback": Case(3, error_feedback=1.0, optimizer="counting", accumulate=2, max_norm=0.5),
    "sometimes-unused": Case(3, spare=True),  # adamw decays parameters that have a gradient, even a zero one
    "skipped-step": Case(3, nan_at=2),
    "tied": Case(3, tied=True, unequal_weights=True, max_norm=0.5, drains=(1,)),
    "least": Case(3, staleness="least", lookahead=0, unequal_weights=True, max_norm=0.5, drains=(1,), accumulate=2),
    "least-slack-tied": Case(4, staleness="least", slack=1, lookahead=1, tied=True, routed=True, max_norm=0.5),
    "least-exact": Case(3, staleness="least", slack="exact", nan_at=2, error_feedback=1.0, optimizer="counting"),
    "least-frozen": Case(3, staleness="least", model=frozen_in_front, cut=(1, 4), unequal_weights=True, max_norm=0.5),
    "synchronous": Case(2, delay=0, unequal_weights=True),
}


@pytest.mark.parametrize("name", REPLICAS)
def test_two_replicas_equal_the_oracle_to_rounding(engine_pools: EnginePools, name: str) -> None:
    case = replace(REPLICAS[name], data_parallel_size=2)
    results = engine_pools.run(case, 2)
    expected, losses = run_oracle(case, num_stages=2)
    assert_same_weights(results, expected, TOLERANCE)
    assert_ranks_agree(results)
    if case.nan_at is None and not case.unequal_weights:
        means = np.mean([result["losses"] for result in results if result["losses"]], axis=0)
        assert means == pytest.approx(losses, rel=1e-5)


def test_three_stages_and_two_replicas_share_a_weight(engine_pools: EnginePools) -> None:
    """The weights equal the oracle's up to rounding, since replicas add a stage's uses before the reduction."""
    case = Case(3, model=SHARED_BY_ALL, cut=(2, 2, 3), data_parallel_size=2, max_norm=0.3, optimizer="counting")
    assert_same_weights(engine_pools.run(case, 3), run_oracle(case)[0], 1e-5)


@pytest.mark.parametrize(
    ("options", "alike"),
    [({"max_norm": 0.5, "error_feedback": 1.0}, True), ({"dropout": 0.3}, False), ({"random_input": True}, False)],
    ids=["g + g over w + w is g over w", "layers draw their own numbers", "user code draws its own numbers"],
)
def test_equal_batches_on_both_replicas(engine_pools: EnginePools, options: dict[str, Any], alike: bool) -> None:
    """Two replicas with equal batches give bitwise the weights of one replica, unless random numbers are drawn."""
    one = Case(3, same_data=True, **options)
    alone = weights_of(engine_pools.run(one, 2))
    together = weights_of(engine_pools.run(replace(one, data_parallel_size=2), 2))
    assert all(np.array_equal(alone[name], together[name]) for name in alone) == alike
