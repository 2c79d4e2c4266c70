"""All stages in one process compute what the oracle computes, bitwise: the same engine, without processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.core.cases import Case
from tests.core.compare import (
    assert_same_losses,
    assert_same_norms,
    assert_same_statistics,
    assert_same_weights,
)
from tests.core.random_cases import draw
from tests.core.runs import run_local, run_oracle
from tests.core.test_engine_equals_oracle import (
    STAGES,
    asynchronous,
    over,
    parametrized,
    synchronous,
    with_held_micro_batches,
)

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler")


def check(num_stages: int, case: Case) -> None:
    results = [run_local(case, num_stages)]
    weights, losses = run_oracle(case, num_stages)
    assert_same_weights(results, weights)
    assert_same_losses(results, losses)
    assert_same_norms(results)
    assert_same_statistics(results)


@parametrized(over(STAGES, asynchronous))
def test_uniform_staleness(num_stages: int, case: Case) -> None:
    check(num_stages, case)


@parametrized(over(STAGES, synchronous))
def test_no_delay(num_stages: int, case: Case) -> None:
    check(num_stages, case)


@parametrized(over((2, 3, 4), with_held_micro_batches))
def test_least_staleness(num_stages: int, case: Case) -> None:
    check(num_stages, case)


@pytest.mark.parametrize("seed", [pytest.param(k, marks=[] if k < 20 else pytest.mark.slow) for k in range(60)])
def test_random_case(seed: int) -> None:
    """With drains, evaluations and resumes wherever they fall."""
    num_stages, case = draw(seed)
    check(num_stages, replace(case, data_parallel_size=1))
