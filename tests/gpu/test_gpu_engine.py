"""Several stages on one GPU equal the oracle on that GPU; their tensors travel through the host."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.helpers.cases import Case
from tests.helpers.engine import assert_ranks_agree, assert_same_weights, run_oracle, weights_of
from tests.helpers.pool import EnginePools

CASES = {
    "plain": Case(4),
    "lookahead": Case(6, lookahead=2, max_norm=0.5, scheduler=True),
    "partial-batches": Case(4, batch_sizes=(8, 5, 2), unequal_weights=True),
    "feedback": Case(4, optimizer="muon", error_feedback=1.0, accumulate=2),
    "drains": Case(4, drains=(0, 2)),
    "dropout": Case(4, dropout=0.3),
    "checkpointing": Case(4, checkpointing=True),
    "least": Case(6, staleness="least", max_norm=0.5, scheduler=True, drains=(1,)),
    "least-feedback": Case(4, optimizer="muon", error_feedback=1.0, staleness="least", slack=1, dropout=0.3),
    "least-exact-norm": Case(6, staleness="least", slack="exact", max_norm=0.5),
    "synchronous": Case(3, delay=0, max_norm=0.5),
}
# fp32 kernels choose their order of summation by shape and load, so results are equal up to rounding, as for replicas.
TOLERANCE = 2e-6


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_stages_that_share_a_gpu_equal_the_oracle(engine_pools: EnginePools, name: str, stages: int) -> None:
    case = dataclasses.replace(CASES[name], device="cuda:0")
    results = engine_pools.run(case, stages)
    expected, _ = run_oracle(case, num_stages=stages)
    assert_same_weights(results, expected, TOLERANCE)
    assert_ranks_agree(results)


def test_replicas_that_share_a_gpu_hold_the_same_bits(engine_pools: EnginePools) -> None:
    results = engine_pools.run(Case(3, data_parallel_size=2, unequal_weights=True, device="cuda:0"), 2)
    first, second = weights_of(results, 0), weights_of(results, 1)
    assert all(np.array_equal(first[name], second[name]) for name in first)
