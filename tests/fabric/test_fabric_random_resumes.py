"""Chains of resumes of Fabric loops, drawn at random: the end is the oracle's.

pytest -m slow tests/fabric/test_fabric_random_resumes.py      # 150 chains
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.helpers.compare import assert_same_norms, weights_of
from tests.helpers.engine import run_oracle
from tests.helpers.fabric import go_through
from tests.helpers.pool import Pools
from tests.helpers.random_resumes import Leg, chains, expected_case


def drawn(examples: int) -> settings:
    """No shrinking: an example takes seconds."""
    return settings(
        max_examples=examples, phases=[Phase.explicit, Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip


pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler")


def check(pools: Pools, legs: tuple[Leg, ...], folder: Path) -> None:
    """Weights are the oracle's, losses those of the run that was not interrupted."""
    whole = run(pools, legs[0], None, folder / "0.ckpt")
    delay = legs[0].case.delay
    for number, leg in enumerate(legs[1:], 1):
        results = run(pools, leg, folder / f"{number - 1}.ckpt", folder / f"{number}.ckpt")
        if leg.case.delay == delay:
            assert repr(results[0]["losses"]) == repr(whole[0]["losses"][-len(results[0]["losses"]) :])  # NaN, too
            assert_same_weights(results, {name: np.asarray(w) for name, w in weights_of(whole).items()})
        else:
            whole, delay = results, leg.case.delay
    if legs[0].case.bf16:  # Fabric converts what goes into a model and comes out of it
        return
    expected, _ = run_oracle(expected_case(legs), legs[-1].stages)
    assert_same_weights(whole, {name: weight.numpy() for name, weight in expected.items()})


def run(pools: Pools, leg: Leg, loads: Path | None, saves: Path) -> list[dict[str, Any]]:
    """Run a leg; all ranks agree."""
    processes = leg.stages * leg.case.data_parallel_size
    results = pools.run(
        processes, go_through, leg.case, loads and str(loads), str(saves) if leg.saves_at else None,
        leg.saves_at or 0, leg.evaluates, leg.options, timeout=120.0,
    )  # fmt: skip
    assert_same_norms(results)
    return results


def assert_same_weights(results: list[dict[str, Any]], expected: dict[str, np.ndarray]) -> None:
    """Of every replica; NaN is equal to NaN."""
    for replica in {result["replica"] for result in results}:
        weights = weights_of(results, replica)
        different = [n for n, value in expected.items() if not np.array_equal(weights[n], value, equal_nan=True)]
        assert not different, f"not bitwise equal: {different}"


@drawn(4)
@given(legs=chains())
def test_the_end_is_the_oracles(pools: Pools, tmp_path_factory: pytest.TempPathFactory, legs: tuple[Leg, ...]) -> None:
    check(pools, legs, tmp_path_factory.mktemp("chain"))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@drawn(150)
@given(legs=chains())
def test_more_chains(pools: Pools, tmp_path_factory: pytest.TempPathFactory, legs: tuple[Leg, ...]) -> None:
    check(pools, legs, tmp_path_factory.mktemp("chain"))
