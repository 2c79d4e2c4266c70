"""Randomly drawn chains of resumed Fabric loops end with the oracle's weights.

pytest -m slow tests/fabric/test_fabric_random_resumes.py      # 60 chains over processes
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.helpers.engine import assert_ranks_agree, assert_same_weights, run_oracle, weights_of
from tests.helpers.fabric import go_through
from tests.helpers.pool import Pools
from tests.helpers.random_cases import Leg, chains, expected_case

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler")


def check(legs: tuple[Leg, ...], folder: Path, pools: Pools | None = None) -> None:
    """Compare weights with the oracle's, and losses with an uninterrupted run's; without pools, run in this process."""
    whole = run(legs[0], None, folder / "0.ckpt", pools)
    delay = legs[0].case.delay
    for number, leg in enumerate(legs[1:], 1):
        results = run(leg, folder / f"{number - 1}.ckpt", folder / f"{number}.ckpt", pools)
        if leg.case.delay == delay:
            assert repr(results[0]["losses"]) == repr(whole[0]["losses"][-len(results[0]["losses"]) :])  # also for NaN
            assert_same_weights(results, weights_of(whole))
        else:
            whole, delay = results, leg.case.delay
    if legs[0].case.bf16:  # Fabric converts a model's inputs and outputs
        return
    expected, _ = run_oracle(expected_case(legs), legs[-1].stages)
    assert_same_weights(whole, expected)


def run(leg: Leg, loads: Path | None, saves: Path, pools: Pools | None) -> list[dict[str, Any]]:
    """Run a leg, and check that all ranks agree; without pools, there is one replica (all would read the same data)."""
    saving = (loads and str(loads), str(saves) if leg.saves_at else None, leg.saves_at or 0, leg.evaluates)
    if pools is None:
        return [go_through(replace(leg.case, data_parallel_size=1), *saving, stages=leg.stages)]
    processes = leg.stages * leg.case.data_parallel_size
    results = pools.run(processes, go_through, leg.case, *saving, leg.options, timeout=120.0)
    assert_ranks_agree(results)
    return results


@pytest.mark.parametrize(
    ("processes", "count"),
    [(False, 4), (True, 2), pytest.param(True, 60, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])],
)
def test_the_end_is_the_oracles(pools: Pools, tmp_path: Path, processes: bool, count: int) -> None:
    numbers = itertools.count()

    @settings(max_examples=count, phases=[Phase.generate], suppress_health_check=[HealthCheck.data_too_large])
    @given(legs=chains())
    def go_on(legs: tuple[Leg, ...]) -> None:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        check(legs, folder, pools if processes else None)

    go_on()
