"""A replica whose batch holds no targets says nothing about means: those of the others are a single process's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainer.logging.without_targets import BATCHES, REPLICAS, fit, of_replica
from tests.trainer.pool import Pools

MASKED = {
    "first batch of one": of_replica(0, 0),
    "a batch of the other": of_replica(1, 1),
    "different batches": [*of_replica(1, 0), *of_replica(2, 1)],
    "a batch of all": [*of_replica(1, 0), *of_replica(1, 1)],
    "first batch of all": [*of_replica(0, 0), *of_replica(0, 1)],
    "all of one": [sample for batch in range(BATCHES) for sample in of_replica(batch, 1)],
    "nothing": [],
}
PROCESSES = {"async": 2 * REPLICAS, "sync": 2 * REPLICAS}


def records(result: dict[str, Any]) -> dict[tuple[int, str], float]:
    return {(step, name): value for step, items in result["records"] for name, value in items}


def cases() -> list[Any]:
    chosen = {
        ("async", True): {"first batch of one"}, ("async", False): {"different batches"},
        ("sync", True): {"all of one"},
    }  # fmt: skip
    return [
        pytest.param(
            strategy, name, weighs, id=f"{strategy}-{name}-{'weights' if weighs else 'NaN'}",
            marks=() if name in chosen.get((strategy, weighs), ()) else pytest.mark.slow,
        )
        for strategy in PROCESSES
        for name in MASKED
        for weighs in (True, False)
    ]  # fmt: skip


@pytest.mark.parametrize(("strategy", "name", "weighs"), cases())
def test_what_is_logged_is_that_of_a_single_process(pools: Pools, strategy: str, name: str, weighs: bool) -> None:
    masked = MASKED[name]
    (plain,) = pools.run(1, fit, "plain", masked, weighs)
    ranks = pools.run(PROCESSES[strategy], fit, strategy, masked, weighs)
    for result in ranks:
        assert result["steps"] == plain["steps"] == 2 * BATCHES
        assert result["metrics"] == pytest.approx(plain["metrics"], rel=1e-5, nan_ok=True)
        assert not [text for text in result["told"] if "sync_dist" in text]
    assert records(ranks[0]) == pytest.approx(records(plain), rel=1e-5, nan_ok=True)


def test_accumulated_batches_of_which_one_has_none(pools: Pools) -> None:
    masked = [*of_replica(0, 0), *of_replica(3, 1)]
    (plain,) = pools.run(1, fit, "plain", masked, True)
    for result in pools.run(PROCESSES["async"], fit, "async", masked, True, 2):
        assert result["steps"] == BATCHES
        for name in ("loss_epoch", "a", "b", "count_epoch", "metric", "val_loss", "val_count", "val_metric"):
            assert result["metrics"][name] == pytest.approx(plain["metrics"][name], rel=1e-5)
