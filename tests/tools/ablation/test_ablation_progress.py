"""The estimate of the time that an ablation still takes."""

from __future__ import annotations

import pytest

from lightning_asyncpp.tools.ablation.grid import CellKey, Group, Row
from lightning_asyncpp.tools.ablation.recipe.rows import Plan
from lightning_asyncpp.tools.ablation.results import CellResult
from lightning_asyncpp.tools.ablation.run.training_runner import seconds_left


def key(optimizer: str, seed: int = 1) -> CellKey:
    return CellKey(Row(Group(optimizer, None), "0", None, "none"), 0.1, seed)


def result(seconds: float) -> CellResult:
    return CellResult("finished", 1.0, 10, seconds)


def test_there_is_no_estimate_before_a_training_has_finished() -> None:
    plan = Plan([key("A")], [key("A")])
    assert seconds_left(plan, {}, 1) is None
    assert seconds_left(plan, {key("A", 2): CellResult("diverged", None, 10, 3.0)}, 1) is None


def test_the_rest_takes_as_long_as_finished_trainings_of_its_optimizer() -> None:
    results = {key("A", 1): result(10), key("A", 2): result(10), key("B", 1): result(40), key("B", 2): result(40)}
    results[key("B", 3)] = CellResult("diverged", None, 1, 0.5)
    pending = [key("A", 4), key("B", 4), key("C", 4)]
    assert seconds_left(Plan(pending=pending), results, 1) == 10 + 40 + 25
    assert seconds_left(Plan(pending=pending, waiting=2), results, 1) == 10 + 40 + 3 * 25
    assert seconds_left(Plan(pending=pending), results, 3) == seconds_left(Plan(pending=pending), results, 9) == 25
    assert seconds_left(Plan(pending=pending), results, 1, failed=[key("B", 4)]) == 10 + 25


def test_what_is_under_way_counts_only_with_its_rest() -> None:
    results, pending = {key("A", 1): result(10)}, [key("A", 2), key("A", 3), key("A", 4)]
    spent = {key("A", 2): 4.0, key("A", 3): 99.0}
    left = seconds_left(Plan(pending=pending), results, 2, start=2.0, spent=spent)
    assert left == pytest.approx((3 * 12 - 4 - 12) / 2)


def test_nothing_left_takes_no_time() -> None:
    assert seconds_left(Plan([key("A")]), {key("A"): result(10)}, 4) == 0
