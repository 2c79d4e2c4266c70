"""Comparing what the ranks of a pipeline returned with the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from lightning_asyncpp.core.cut.units import pipeline_units
from tests.helpers.engine import run_oracle
from tests.helpers.engine_pool import EnginePools
from tests.helpers.random_cases import draw, is_exact

Results = list[dict[str, Any]]


def weights_of(results: Results, replica: int = 0) -> dict[str, np.ndarray]:
    """The weights of all stages of a replica."""
    weights: dict[str, np.ndarray] = {}
    for result in results:
        if result["replica"] == replica:
            weights |= {name: np.asarray(value) for name, value in result["weights"].items()}
    return weights


def assert_same_weights(results: Results, expected: dict[str, Tensor]) -> None:
    """Bitwise, and every parameter on exactly one stage."""
    weights = weights_of(results)
    assert sorted(weights) == sorted(expected)
    assert sum(len(result["weights"]) for result in results) == len(expected)
    different = [name for name in expected if not np.array_equal(weights[name], expected[name].numpy(), equal_nan=True)]
    assert not different, f"not bitwise equal: {different}"
    copies = [copy for result in results for copy in result.get("copies", {}).items()]
    apart = [name for name, value in copies if not np.array_equal(np.asarray(value), weights[name], equal_nan=True)]
    assert not apart, f"the copies of a shared parameter differ: {apart}"


def assert_same_losses(results: Results, expected: list[float]) -> None:
    """Of the mini-batches whose samples count, on the last stage, which has rank 0."""
    assert all(not result["losses"] for result in results if result["stage"] != results[0]["stage"])
    losses = [loss if loss else float("nan") for loss in results[0]["losses"]]  # a batch without weight has no loss
    assert losses == pytest.approx(expected, rel=1e-6, nan_ok=True)


def assert_same_norms(results: Results) -> None:
    """All ranks clip and log the same number."""
    assert all(result["norms"] == results[0]["norms"] for result in results)


def assert_same_statistics(results: Results) -> None:
    """All ranks log the same numbers."""
    assert all(result["statistics"] == results[0]["statistics"] for result in results)


def check_random_case(pools: EnginePools, seed: int) -> None:
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
