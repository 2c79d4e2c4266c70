"""The engine equals the oracle, and never hangs, where its host reads numbers long after they were computed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.compare import assert_same_norms, assert_same_weights, check_random_case
from tests.helpers.engine import run_oracle
from tests.helpers.engine_pool import EnginePools
from tests.helpers.workers import opened
from tests.nccl_rules.late import read_late
from tests.nccl_rules.test_engine_by_the_rules import CASES

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler")


# What their numbers are, and when they are read, is as in the other cases: "least" has a norm and a shared weight.
REPEATS = ("no-lookahead", "partial", "checkpointing", "synchronous", "tied", "far-ahead", "clip", "drains")


@pytest.fixture(scope="module")
def late() -> Iterator[EnginePools]:
    with opened(EnginePools(read_late)) as engine_pools:
        yield engine_pools


@pytest.mark.parametrize(
    "stages", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(5, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in REPEATS else name for name in CASES]
)
def test_it_equals_the_oracle(late: EnginePools, name: str, stages: int) -> None:
    case = CASES[name]
    results = late.run(case, stages)
    expected, _ = run_oracle(case, stages)
    assert_same_weights(results, expected)
    assert_same_norms(results)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow][seed < 1001 :]) for seed in range(1000, 1040)]
)
def test_random_case(late: EnginePools, seed: int) -> None:
    """With replicas, too."""
    check_random_case(late, seed)
