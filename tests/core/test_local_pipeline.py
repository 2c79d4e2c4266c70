"""All stages in one process compute what the oracle computes, bitwise: the same engine, without processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_asyncpp.core.ranks.mesh import Mesh
from tests.core.test_engine_equals_oracle import (
    STAGES,
    asynchronous,
    over,
    parametrized,
    synchronous,
    with_held_microbatches,
)
from tests.helpers.cases import Case
from tests.helpers.compare import (
    assert_same_losses,
    assert_same_norms,
    assert_same_statistics,
    assert_same_weights,
)
from tests.helpers.engine import Training, run_local, run_oracle
from tests.helpers.random_cases import draw

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


@parametrized(over((2, 3, 4), with_held_microbatches))
def test_least_staleness(num_stages: int, case: Case) -> None:
    check(num_stages, case)


@pytest.mark.parametrize("seed", [pytest.param(k, marks=[] if k < 20 else pytest.mark.slow) for k in range(60)])
def test_random_case(seed: int) -> None:
    """With drains, evaluations and resumes wherever they fall."""
    num_stages, case = draw(seed)
    check(num_stages, replace(case, data_parallel_size=1))


def test_a_gradient_that_was_left_out_has_no_norm_to_clip_by() -> None:
    """A run that goes on with stages that step ahead clips by the norm of the newest update."""
    case = Case(3, staleness="least", slack="exact", max_norm=0.5, nan_at=3, batch_sizes=(8, 8, 8, 8))
    training = Training(case, Mesh(1, 1, 0), 2)
    for index in range(4):
        training.complete([training.engine.run(case.batch(index), case.step(training.model))])
    training.drain()
    assert len(training.norms) == 3
    assert training.engine.state_dict()["norm"] == training.norms[-1]
