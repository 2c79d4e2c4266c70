"""A Fabric loop trains to the weights of the oracle, bitwise in fp32, for any number of stages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_asyncpp.core.schedule import Slack, Staleness
from lightning_asyncpp.storage import merged
from tests.helpers import fabric as runs
from tests.helpers.cases import Case
from tests.helpers.compare import assert_same_norms, assert_same_weights, weights_of
from tests.helpers.engine import run_oracle
from tests.helpers.pool import Pools

STAGES = (1, 2, 3)
BATCHES = (8, 8, 8, 8, 5)
CASES = {
    "plain": Case(4, batch_sizes=BATCHES),
    "clip-schedule": Case(4, max_norm=0.3, scheduler=True, batch_sizes=BATCHES),
    "muon-feedback-clip-schedule": Case(
        3, optimizer="muon", error_feedback=1.0, max_norm=0.3, scheduler=True, batch_sizes=BATCHES, cut="back"
    ),
    "accumulate-dropout": Case(
        3, accumulate=2, dropout=0.2, random_input=True, max_norm=0.3, batch_sizes=BATCHES, cut="front"
    ),
    "weights-skip": Case(4, unequal_weights=True, nan_at=1, max_norm=0.3, batch_sizes=BATCHES),
    "shared-routed": Case(
        3, tied=True, routed=True, optimizer="muon", error_feedback=1.0, max_norm=0.3, batch_sizes=BATCHES
    ),
    "synchronous": Case(2, delay=0, optimizer="muon", error_feedback=1.0, scheduler=True, batch_sizes=BATCHES),
}
RESUMED = Case(
    3, optimizer="muon", error_feedback=1.0, max_norm=0.3, scheduler=True, dropout=0.2, accumulate=2,
    batch_sizes=(8,) * 10, cut="front",
)  # fmt: skip


def weights_by_name(results: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    return merged([result["weights"] for result in results])


@pytest.mark.parametrize("num_stages", [*(pytest.param(few, marks=pytest.mark.slow) for few in (1, 2)), 3])
@pytest.mark.parametrize("name", CASES)
def test_weights_are_the_oracles(pools: Pools, num_stages: int, name: str) -> None:
    case = CASES[name]
    results = pools.run(num_stages, runs.train, case, (1, 2) if name == "plain" else ())
    weights, losses = run_oracle(case)
    assert_same_weights(results, weights)
    assert_same_norms(results)
    assert all(result["metrics"] == results[0]["metrics"] for result in results)
    assert results[0]["metrics"].get("samples") == (2 * 5.0 if case.routed else None)
    if case.accumulate == 1:
        assert results[0]["losses"] == pytest.approx(losses, rel=1e-6, nan_ok=True)


@pytest.mark.parametrize("num_stages", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_evaluations_within_a_mini_batch_leave_the_weights(pools: Pools, num_stages: int) -> None:
    """All stages are drained for them, also the last, which has nothing in flight."""
    case = CASES["accumulate-dropout"]
    results = pools.run(num_stages, runs.evaluate_while_accumulating, case)
    assert_same_weights(results, run_oracle(case)[0])


@pytest.mark.parametrize("num_stages", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    ("staleness", "slack"),
    [("least", 0), pytest.param("least", "exact", marks=pytest.mark.slow)],
)
def test_where_stages_differ_in_staleness_it_has_the_weights_of_the_oracle(
    pools: Pools, num_stages: int, staleness: Staleness, slack: Slack
) -> None:
    case = Case(
        3, staleness=staleness, slack=slack, optimizer="muon", error_feedback=1.0, max_norm=0.3, scheduler=True,
        batch_sizes=BATCHES, cut="back",
    )  # fmt: skip
    results = pools.run(num_stages, runs.train, case, (1, 2))
    assert_same_weights(results, run_oracle(case, num_stages)[0])
    assert_same_norms(results)


@pytest.mark.parametrize("num_stages", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_a_loaded_run_goes_on_as_the_uninterrupted_one(pools: Pools, num_stages: int, tmp_path: Path) -> None:
    path, case = str(tmp_path / "run.ckpt"), RESUMED
    expected = run_oracle(case)[0]
    assert_same_weights(pools.run(num_stages, runs.save_and_go_on, case, path, 3), expected)
    assert_same_weights(pools.run(num_stages, runs.load_and_go_on, case, path), expected)
    assert torch.load(path, weights_only=True).keys() == {"model", "optimizer", "scheduler", "step", "pipeline"}


@pytest.mark.parametrize("options", [{"tied": True, "routed": True}, {"bf16": True}], ids=["shared-routed", "bf16"])
def test_a_loaded_run_goes_on_with_all_that_versions_hold(
    pools: Pools, options: dict[str, Any], tmp_path: Path
) -> None:
    path, case = str(tmp_path / "run.ckpt"), replace(RESUMED, **options)
    expected = run_oracle(case)[0]
    precision = "bf16-mixed" if case.bf16 else "32-true"
    assert_same_weights(pools.run(2, runs.save_and_go_on, case, path, 3, precision), expected)
    assert_same_weights(pools.run(2, runs.load_and_go_on, case, path, (), precision), expected)
    if case.bf16:
        assert {v.dtype for v in torch.load(path, weights_only=True)["model"].values()} == {torch.bfloat16}


SHARDED = {"state_dict_type": "sharded", "async_checkpoints": True}


@pytest.mark.parametrize(
    ("stages", "options", "saving"),
    [
        ((2, 1), {"tied": True, "routed": True}, SHARDED),
        ((1, 3), {"bf16": True}, {}),
        pytest.param((3, 2), {"tied": True, "routed": True}, {}, marks=pytest.mark.slow),
        pytest.param((2, 3), {"bf16": True}, SHARDED, marks=pytest.mark.slow),
        pytest.param((3, 1), {"optimizer": "adamw"}, SHARDED, marks=pytest.mark.slow),
    ],
)
def test_a_loaded_run_goes_on_with_other_stages(
    pools: Pools, stages: tuple[int, int], options: dict[str, Any], saving: dict[str, Any], tmp_path: Path
) -> None:
    """Bitwise; from one file, or from parts that were written while training went on."""
    path, case = str(tmp_path / "run.ckpt"), replace(RESUMED, **options)
    expected = run_oracle(case)[0]
    precision = "bf16-mixed" if case.bf16 else "32-true"
    before, after = stages
    assert_same_weights(pools.run(before, runs.save_and_go_on, case, path, 3, precision, saving), expected)
    assert_same_weights(pools.run(after, runs.load_and_go_on, case, path, (), precision), expected)


@pytest.mark.parametrize(
    "order", [("optimizer", "model"), pytest.param(("model", "optimizer"), marks=pytest.mark.slow)]
)
def test_model_and_optimizer_may_be_loaded_one_after_the_other(
    pools: Pools, order: tuple[str, str], tmp_path: Path
) -> None:
    path, case = str(tmp_path / "run.ckpt"), RESUMED
    expected = run_oracle(case)[0]
    pools.run(2, runs.save_and_go_on, case, path, 3)
    assert_same_weights(pools.run(2, runs.load_and_go_on, case, path, order), expected)


def test_a_model_that_is_loaded_later_leaves_the_run_where_it_is(pools: Pools, tmp_path: Path) -> None:
    """Only right after the optimizer it may be the rest of the same checkpoint."""
    path = str(tmp_path / "run.ckpt")
    pools.run(2, runs.save_and_go_on, RESUMED, path, 2)
    assert pools.run(2, runs.load_the_model_later, RESUMED, path) == [(2, 3, 3)] * 2


@pytest.mark.parametrize("num_stages", STAGES)
def test_evaluation_sees_the_newest_weights(pools: Pools, num_stages: int) -> None:
    pairs = pools.run(num_stages, runs.evaluate_after_each, Case(4, dropout=0.3))[0]
    assert len(pairs) == 5
    for output, expected in pairs:
        np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("delay", [1, 0])
def test_replicas_equal_the_oracle_to_rounding(pools: Pools, delay: int) -> None:
    case = Case(4, delay=delay, data_parallel_size=2, max_norm=0.3, scheduler=True)
    results = pools.run(4, runs.train, case, (1,))
    expected = run_oracle(case)[0]
    for replica in (0, 1):
        for name, value in weights_of(results, replica).items():
            np.testing.assert_allclose(value, expected[name].numpy(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_lower_precision_does_not_depend_on_the_number_of_stages(pools: Pools, precision: str) -> None:
    case = Case(3, max_norm=0.3, dropout=0.2)
    one, three = (weights_by_name(pools.run(n, runs.train, case, (1,), precision)) for n in (1, 3))
    exact = weights_by_name(pools.run(1, runs.train, case))
    assert one.keys() == three.keys()
    assert all(np.array_equal(one[name], three[name]) for name in one)
    assert any(not np.array_equal(one[name], exact[name]) for name in one)


@pytest.mark.parametrize(("told", "replicas"), [pytest.param((0,), 1, marks=pytest.mark.slow), ((1, 2), 1), ((1,), 2)])
def test_ranks_that_are_told_to_end_agree_and_resume(
    pools: Pools, told: tuple[int, ...], replicas: int, tmp_path: Path
) -> None:
    """SIGTERM on any rank, at any moment, ends the loop on all of them after the same mini-batch."""
    path = str(tmp_path / "told.ckpt")
    case = replace(RESUMED, data_parallel_size=replicas)
    world = 3 if replicas == 1 else 2
    steps = pools.run(world, runs.told_to_end, case, path, told, 3)
    assert steps in ([[4]] * world, [[5]] * world, [[6]] * world)
    whole, resumed = pools.run(world, runs.train, case), pools.run(world, runs.load_and_go_on, case, path)
    for name, weight in weights_by_name(whole).items():
        np.testing.assert_array_equal(weights_by_name(resumed)[name], weight)
