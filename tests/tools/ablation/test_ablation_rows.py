"""Which trainings an ablation needs next, without training any."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_asyncpp.tools.ablation.grid import CellKey
from lightning_asyncpp.tools.ablation.recipe.recipe import ClassConfig, Correction, Delay, Momentum, OptimizerGrid
from lightning_asyncpp.tools.ablation.recipe.rows import Plan, RowRecipe, best_lr, make_plan, search, with_leaders

ADAMW = ClassConfig("torch.optim.AdamW", {"betas": [0.9, 0.95]})
EF = ClassConfig("lightning_asyncpp.optim.ErrorFeedback", {})
NONE = Correction("none", None)
LRS = (0.001, 0.003, 0.01)


def row(correction: Correction = NONE, delay: object = 1, lrs: tuple[float, ...] = LRS) -> RowRecipe:
    return RowRecipe(
        OptimizerGrid("AdamW", ADAMW, "lr", lrs, None, (correction,)), None, Delay({"delay": delay}), correction
    )


def run_all(
    rows: list[RowRecipe], seeds: list[int], extensions: int, loss: Callable[[CellKey], float | None]
) -> tuple[Plan, list[CellKey]]:
    """Plan and answer until nothing is pending; returns the last plan and the cells in the order they were run."""
    outcomes: dict[CellKey, float | None] = {}
    while (plan := make_plan(rows, seeds, extensions, outcomes)).pending:
        outcomes[plan.pending[0]] = loss(plan.pending[0])
    return plan, list(outcomes)


def test_first_the_first_seed_runs_every_lr_then_the_others_run_the_best() -> None:
    losses = {0.001: 2.0, 0.003: 1.0, 0.01: 1.5}
    plan, ran = run_all([row()], [7, 8, 9], 2, lambda cell: losses[cell.lr] + cell.seed)
    assert [(cell.lr, cell.seed) for cell in ran] == [(0.001, 7), (0.003, 7), (0.01, 7), (0.003, 8), (0.003, 9)]
    assert plan.chosen == {row().key: 0.003}
    assert plan.total == 5


def test_the_expected_number_of_runs_counts_seeds_that_wait_for_the_search() -> None:
    plan = make_plan([row()], [1, 2, 3], 2, {})
    assert (len(plan.pending), plan.waiting, plan.total) == (3, 2, 5)


def test_the_search_goes_on_above_while_the_best_is_the_highest() -> None:
    losses = {0.001: 3.0, 0.003: 2.0, 0.01: 1.0, 0.0333: 0.5, 0.111: 0.7}
    assert search(LRS, 2, {}) == list(LRS)
    assert search(LRS, 2, losses) == [0.001, 0.003, 0.01, 0.0333, 0.111]
    assert search(LRS, 1, losses) == [0.001, 0.003, 0.01, 0.0333]
    assert search(LRS, 0, losses) == list(LRS)


def test_the_search_ends_when_the_extension_is_worse_or_diverges() -> None:
    for after in (1.5, None):
        losses = {0.001: 3.0, 0.003: 2.0, 0.01: 1.0, 0.0333: after}
        assert search(LRS, 5, losses) == [0.001, 0.003, 0.01, 0.0333]


def test_the_search_goes_on_below_without_rounding_noise() -> None:
    assert search((0.001, 0.003, 0.01), 1, {0.001: 1.0, 0.003: 2.0, 0.01: 3.0}) == [0.000333, 0.001, 0.003, 0.01]
    assert search((0.001, 0.003), 1, {0.001: 2.0, 0.003: 1.0}) == [0.001, 0.003, 0.009]


def test_where_all_diverged_the_search_goes_on_below() -> None:
    diverged = dict.fromkeys(LRS)
    assert search(LRS, 2, diverged) == [0.000333, *LRS]
    assert search(LRS, 2, diverged | {0.000333: 4.0}) == [0.000111, 0.000333, *LRS]


def test_a_row_where_all_diverged_ends_without_a_choice_and_without_seeds() -> None:
    plan, ran = run_all([row()], [1, 2], 1, lambda cell: None)
    assert len(ran) == 4
    assert plan.chosen == {row().key: None}
    assert plan.waiting == 0


def test_a_single_lr_is_not_extended() -> None:
    _, ran = run_all([row(lrs=(0.01,))], [1, 2], 3, lambda cell: 1.0)
    assert [(cell.lr, cell.seed) for cell in ran] == [(0.01, 1), (0.01, 2)]


def test_a_diverged_lr_is_the_worst_and_equals_go_to_the_lower_one() -> None:
    assert best_lr({0.1: None, 0.01: 5.0}) == 0.01
    assert best_lr({0.1: 2.0, 0.01: 2.0}) == 0.01
    assert best_lr({0.1: None}) is None


def test_a_correction_with_the_same_lr_waits_for_the_uncorrected_row() -> None:
    same = row(Correction("EF", EF, same_lr=True))
    rows = [same, row()]
    first = make_plan(rows, [1, 2], 0, {})
    assert {cell.row for cell in first.pending} == {row().key}
    assert first.total == 3 + 1 + 2
    losses = {0.001: 2.0, 0.003: 1.0, 0.01: 1.5}
    plan, ran = run_all(rows, [1, 2], 0, lambda cell: losses[cell.lr])
    assert [(cell.lr, cell.seed) for cell in ran if cell.row == same.key] == [(0.003, 1), (0.003, 2)]
    assert plan.chosen[same.key] == 0.003


def test_a_correction_with_the_same_lr_is_not_run_where_the_uncorrected_row_diverged() -> None:
    same = row(Correction("EF", EF, same_lr=True))
    plan, ran = run_all([row(), same], [1], 0, lambda cell: None)
    assert {cell.row for cell in ran} == {row().key}
    assert plan.chosen[same.key] is None


def test_a_row_does_not_wait_for_another() -> None:
    slow, fast = row(delay=0), row(delay=1)
    outcomes = {CellKey(fast.key, lr, 1): lr for lr in LRS}
    plan = make_plan([slow, fast], [1, 2], 0, outcomes)
    assert CellKey(fast.key, 0.001, 2) in plan.pending
    assert CellKey(slow.key, 0.001, 1) in plan.pending


def test_rows_whose_lr_is_used_are_kept_with_the_wanted_ones() -> None:
    same = row(Correction("EF", EF, same_lr=True))
    other = row(delay=2)
    assert with_leaders([row(), same, other], lambda r: r is same) == [row(), same]


def test_the_momentum_and_the_lr_are_set_where_they_belong() -> None:
    momentum = Momentum("betas.0", (0.0, 0.5))
    grid = OptimizerGrid("AdamW", ADAMW, "lr", LRS, momentum, (NONE,))
    built = grid.build(0.003, 0.5, Correction("EF", EF))
    inner = {"class_path": "torch.optim.AdamW", "init_args": {"betas": [0.5, 0.95], "lr": 0.003}}
    assert built == {"class_path": EF.class_path, "init_args": {"base": inner}}
    assert ADAMW.init_args == {"betas": [0.9, 0.95]}


@given(
    st.lists(st.floats(1e-6, 10), min_size=1, max_size=5, unique_by=lambda lr: round(lr, 9)),
    st.integers(0, 4),
    st.integers(1, 3),
    st.data(),
)
def test_every_search_ends_with_the_best_of_what_it_tried(
    lrs: list[float], extensions: int, seeds: int, data: st.DataObject
) -> None:
    memory: dict[CellKey, float | None] = {}

    def loss(cell: CellKey) -> float | None:
        if cell not in memory:
            memory[cell] = data.draw(st.none() | st.floats(0, 10))
        return memory[cell]

    one = row(lrs=tuple(sorted(lrs)))
    plan, ran = run_all([one], list(range(seeds)), extensions, loss)
    searched = {cell.lr: memory[cell] for cell in ran if cell.seed == 0}
    assert len(set(ran)) == len(ran)
    assert len(lrs) <= len(searched) <= len(lrs) + extensions
    assert plan.chosen[one.key] == best_lr(searched)
    expected = len(searched) + (seeds - 1 if best_lr(searched) is not None else 0)
    assert len(ran) == plan.total == expected


@pytest.mark.parametrize("delay", ["pipedream", 2])
def test_delays_are_named_as_in_the_tables(delay: object) -> None:
    named = Delay({"delay": delay, "stages": 4, "micro_batches": 2})
    assert (named.text, named.stages) == (f"{delay} micro_batches=2", 4)
