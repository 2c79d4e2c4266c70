"""A training is the same again, for every number of stages, and whatever the process did before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.evaluations import (
    Evaluations,
    Unpredictable,
    fabric_batches,
    fit_deterministically,
    trainer_batches,
    trajectory,
)
from tests.helpers.oracle import assert_equal_weights, joined_parts
from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run

RUN = Run(
    Net, options={"microbatches": 4}, samples=48, batch_size=12, shuffle=True, trainer={"max_epochs": 2}
)  # fmt: skip
READING = {
    "a shuffling sampler": Evaluations(drawing=False, drawn_before=True),
    "torch's own shuffling, and noise": Evaluations(shuffled=True, drawn_before=True),
    "workers that add noise": Evaluations(workers=2, shuffled=True),
}


def seen(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What does not depend on the number of stages."""
    first = ranks[0]  # the last stage
    assert all(rank["batches"] in ([], first["batches"]) for rank in ranks)
    return {
        "weights": joined_parts([rank["weights"] for rank in ranks]),
        **{name: first[name] for name in ("losses", "epochs", "counted", "batches")},
    }


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert_equal_weights(found.pop("weights"), expected["weights"])
    assert found == {name: value for name, value in expected.items() if name != "weights"}


CASES = [pytest.param(name, marks=pytest.mark.slow if plan.workers else ()) for name, plan in READING.items()]
PATIENT = 200.0  # seconds, for processes that start processes


@pytest.mark.parametrize("name", CASES)
def test_neither_stages_nor_the_past_of_the_process_matter(pools: Pools, name: str) -> None:
    plan = READING[name]
    expected = seen(pools.run(1, trajectory, RUN, None, replace(plan, drawn_before=False), timeout=PATIENT))
    assert len(set(expected["batches"])) >= 16, "microbatches differ, and each is seen"
    for stages in (1, 3):
        same(seen(pools.run(stages, trajectory, RUN, None, plan, timeout=PATIENT)), expected)
    same(seen(pools.run(1, trajectory, replace(RUN, strategy="delayed"), None, plan, timeout=PATIENT)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", READING)
@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_four_stages_and_two_replicas(pools: Pools, name: str, strategy: str) -> None:
    """With replicas twice the same: their sums are rounded otherwise than in one process."""
    run = replace(RUN, strategy=strategy)
    expected = seen(pools.run(1, trajectory, run, None, READING[name], timeout=PATIENT))
    same(seen(pools.run(4, trajectory, run, None, READING[name], timeout=PATIENT)), expected)
    run = replace(run, options=run.options | {"data_parallel_size": 2}, samples=96)
    again = [pools.run(4, trajectory, run, None, READING[name], timeout=PATIENT) for _ in range(2)]
    for first, second in zip(*again):
        for kind in ("weights", "buffers"):
            assert_equal_weights(first.pop(kind), second.pop(kind))
        assert first == second


def test_without_a_seed_the_data_has_the_same_order(pools: Pools) -> None:
    plan = Evaluations(drawing=False, seeded=False)
    one, three = (pools.run(stages, trajectory, RUN, None, plan, timeout=PATIENT) for stages in (1, 3))
    assert three[0]["batches"] == three[-1]["batches"] == one[0]["batches"]
    assert three[1]["batches"] == []


@pytest.mark.parametrize("name", READING)
def test_fabric_reads_what_the_trainer_reads(pools: Pools, name: str) -> None:
    plan = replace(READING[name], drawn_before=False)
    expected = pools.run(1, trainer_batches, RUN, plan, timeout=PATIENT)[0]
    assert len(expected) == 8
    for world in (1, 2):
        assert pools.run(world, fabric_batches, RUN, plan, timeout=PATIENT) == [expected] * world


@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_deterministic_algorithms_are_those_of_every_rank(pools: Pools, strategy: str) -> None:
    run = replace(RUN, strategy=strategy, options={"microbatches": 2}, trainer={"max_epochs": 1})
    plain = pools.run(2, fit_deterministically, run, None)
    strict = pools.run(2, fit_deterministically, run, True)
    assert [rank["enabled"] for rank in plain + strict] == [False, False, True, True]
    for found, expected in zip(strict, plain):
        assert_equal_weights(found["weights"], expected["weights"])


def test_an_operation_that_is_not_deterministic_is_refused_or_warned_of(pools: Pools) -> None:
    """As under a plain Trainer; it runs on the last stage, rank 0, alone."""
    run = replace(RUN, module=Unpredictable, options={"microbatches": 2}, trainer={"max_epochs": 1})
    (alone,) = pools.outcomes(1, fit_deterministically, replace(run, strategy="plain", options={}), True)
    assert alone.error == "RuntimeError"
    outcomes = pools.outcomes(2, fit_deterministically, run, True)
    for outcome in (alone, *outcomes):
        assert "put_ does not have a deterministic implementation" in outcome.message, outcome.message
    assert [rank["warned"] for rank in pools.run(2, fit_deterministically, run, "warn")] == [True, False]
