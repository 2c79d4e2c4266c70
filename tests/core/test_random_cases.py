"""A random search for combinations in which the engine does not compute what the oracle computes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lightning_asyncpp.core.cut.units import pipeline_units
from tests.core.conftest import Pools
from tests.helpers.compare import assert_same_norms, assert_same_statistics, weights_of
from tests.helpers.engine import run_oracle
from tests.helpers.random_cases import draw, is_exact

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler")
DEFAULT = range(8)


def check(pools: Pools, seed: int) -> None:
    num_stages, case = draw(seed)
    results = pools.run(case, num_stages)
    # Replicas read the same data: g + g over w + w is g over w exactly.
    expected, _ = run_oracle(replace(case, data_parallel_size=1), num_stages)
    exact = is_exact(pipeline_units(case.make_model()), case.counts(num_stages), case.data_parallel_size)
    for replica in range(case.data_parallel_size):
        weights = weights_of(results, replica)
        assert sorted(weights) == sorted(expected)
        copies = [copy for r in results if r["replica"] == replica for copy in r["copies"].items()]
        for name, value in [*weights.items(), *copies]:
            np.testing.assert_allclose(value, expected[name].numpy(), rtol=0, atol=0 if exact else 2e-3, err_msg=name)
        assert all(np.array_equal(value, weights[name], equal_nan=True) for name, value in copies)
    assert_same_norms(results)
    assert_same_statistics(results)


@pytest.mark.parametrize("seed", DEFAULT)
def test_random_case(pools: Pools, seed: int) -> None:
    check(pools, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(len(DEFAULT), 400))
def test_more_random_cases(pools: Pools, seed: int) -> None:
    check(pools, seed)
