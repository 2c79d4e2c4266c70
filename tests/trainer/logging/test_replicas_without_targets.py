"""A replica whose batch holds no targets says nothing about means: those of the others are a single process's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.pool import Pools
from tests.trainer.logging.without_targets import BATCHES, REPLICAS, fit, of_replica

MASKED = {
    "first batch of one": of_replica(0, 0),
    "a batch of the other": of_replica(1, 1),
    "different batches": [*of_replica(1, 0), *of_replica(2, 1)],
    "a batch of all": [*of_replica(1, 0), *of_replica(1, 1)],
    "first batch of all": [*of_replica(0, 0), *of_replica(0, 1)],
    "all of one": [sample for batch in range(BATCHES) for sample in of_replica(batch, 1)],
    "nothing": [],
}
OF_EPOCHS = (
    "loss_epoch", "a", "b", "count_epoch", "now_and_then_epoch", "metric", "val_loss", "val_count", "val_metric",
)  # fmt: skip
PROCESSES = {"async": 2 * REPLICAS, "sync": 2 * REPLICAS}


def records(result: dict[str, Any]) -> dict[tuple[int, str], float]:
    return {(step, name): value for step, items in result["records"] for name, value in items}


CASES = [
    pytest.param(
        strategy, name, id=f"{strategy}-{name}",
        marks=() if (strategy, name) in (("async", "first batch of one"), ("sync", "all of one")) else pytest.mark.slow,
    )
    for strategy in PROCESSES
    for name in MASKED
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "name"), CASES)
def test_epochs_are_logged_as_those_of_a_single_process(pools: Pools, strategy: str, name: str) -> None:
    """Values of a step are those of the first replica."""
    masked = MASKED[name]
    (plain,) = pools.run(1, fit, "plain", masked)
    ranks = pools.run(PROCESSES[strategy], fit, strategy, masked)
    epochs = {name for name in plain["metrics"] if name in OF_EPOCHS}
    for result in ranks:
        assert result["steps"] == plain["steps"] == 2 * BATCHES
        found = {name: result["metrics"][name] for name in epochs}
        assert found == pytest.approx({name: plain["metrics"][name] for name in epochs}, rel=1e-5, nan_ok=True)
        assert result["metrics"] == pytest.approx(ranks[0]["metrics"], rel=0, abs=0, nan_ok=True)
        assert not [text for text in result["told"] if "sync_dist" in text]
    epochs_of = [{key: value for key, value in records(r).items() if key[1] in OF_EPOCHS} for r in (ranks[0], plain)]
    assert epochs_of[0] == pytest.approx(epochs_of[1], rel=1e-5, nan_ok=True)


def test_accumulated_batches_of_which_one_has_none(pools: Pools) -> None:
    masked = [*of_replica(0, 0), *of_replica(3, 1)]
    (plain,) = pools.run(1, fit, "plain", masked)
    for result in pools.run(PROCESSES["async"], fit, "async", masked, 2):
        assert result["steps"] == BATCHES
        for name in ("loss_epoch", "a", "b", "count_epoch", "metric", "val_loss", "val_count", "val_metric"):
            assert result["metrics"][name] == pytest.approx(plain["metrics"][name], rel=1e-5)
