"""A random search for combinations in which the engine does not compute what the oracle computes."""

from __future__ import annotations

import pytest

from tests.helpers.compare import check_random_case
from tests.helpers.engine_pool import EnginePools

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler")
DEFAULT = range(8)


@pytest.mark.parametrize("seed", DEFAULT)
def test_random_case(engine_pools: EnginePools, seed: int) -> None:
    check_random_case(engine_pools, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(len(DEFAULT), 400))
def test_more_random_cases(engine_pools: EnginePools, seed: int) -> None:
    check_random_case(engine_pools, seed)
