"""Which trainings an ablation needs next, given what is known: the search of the learning rate, then the seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from lightning_asyncpp.tools.ablation.grid import CellKey, Group, Row
from lightning_asyncpp.tools.ablation.recipe.recipe import (
    ALONE,
    BASE,
    Correction,
    Delay,
    OptimizerGrid,
    Recipe,
    Variant,
)


@dataclass(frozen=True)
class RowRecipe:
    """How to make the trainings of a row, which differ in learning rate and seed only."""

    grid: OptimizerGrid
    momentum: float | None
    delay: Delay
    correction: Correction
    variant: Variant = BASE

    @cached_property
    def key(self) -> Row:
        """The row."""
        group = Group(self.grid.name, self.momentum, self.variant.name)
        return Row(group, self.delay.text, self.delay.stages, self.correction.name)

    @property
    def name(self) -> str:
        """A name to read and to match."""
        stages = "" if self.delay.stages is None else f"-stages{self.delay.stages}"
        momentum = [] if self.momentum is None else [f"momentum{self.momentum:.12g}"]
        variant = [] if self.variant.name is None else [self.variant.name]
        return "_".join(
            [
                self.grid.name,
                *momentum,
                *variant,
                f"delay{self.delay.text}".replace(" ", "-") + stages,
                self.correction.name,
            ]
        )


@dataclass
class Plan:
    """What is to be done.

    Attributes:
        cells: all trainings that are known to be needed, in order.
        pending: those of them that have no outcome yet.
        chosen: the learning rate of every row whose search is over; ``None`` if every one diverged.
        waiting: trainings that will be needed once a learning rate is chosen.
    """

    cells: list[CellKey] = field(default_factory=list)
    pending: list[CellKey] = field(default_factory=list)
    chosen: dict[Row, float | None] = field(default_factory=dict)
    waiting: int = 0

    @property
    def total(self) -> int:
        """Number of trainings as far as it can be known."""
        return len(self.cells) + self.waiting


Outcomes = Mapping[CellKey, float | None]
"""The loss of every training that is over; ``None`` if it diverged."""


def make_rows(recipe: Recipe) -> list[RowRecipe]:
    """List the rows of a recipe; at delay 0, where there is nothing to correct, the optimizer runs alone."""
    return [
        RowRecipe(grid, momentum, delay, correction, variant)
        for grid in recipe.optimizers
        for momentum in (grid.momentum.values if grid.momentum else (None,))
        for variant in recipe.variants
        for delay in recipe.delays
        for correction in ((ALONE,) if delay.is_fresh else grid.corrections)
    ]


def make_plan(rows: Sequence[RowRecipe], seeds: Sequence[int], extensions: int, outcomes: Outcomes) -> Plan:
    """Find what the rows need.

    Args:
        rows: with every row whose learning rate another one of them uses.
        seeds: the first one searches.
        extensions: at most so many learning rates beyond the list, per row.
        outcomes: what is over.
    """
    plan = Plan()
    # Rows that use the learning rate of others come after them, whatever their order in the recipe.
    for row in sorted(rows, key=lambda row: row.correction.same_lr):
        if row.correction.same_lr:
            _plan_seeds(plan, row.key, plan.chosen.get(row.key.uncorrected, math.nan), seeds, outcomes)
        else:
            _plan_row(plan, row, seeds, extensions, outcomes)
    order = {row.key: index for index, row in enumerate(rows)}
    plan.cells.sort(key=lambda cell: order[cell.row])
    plan.pending.sort(key=lambda cell: order[cell.row])
    return plan


def with_leaders(rows: Sequence[RowRecipe], wanted: Callable[[RowRecipe], bool]) -> list[RowRecipe]:
    """The wanted rows and those whose learning rate they use."""
    kept = [row for row in rows if wanted(row)]
    led = {row.key.uncorrected for row in kept if row.correction.same_lr}
    return [row for row in rows if row in kept or row.key in led]


def most_cells(row: RowRecipe, seeds: Sequence[int], extensions: int) -> int:
    """Most trainings that a row can need."""
    if row.correction.same_lr:
        return len(seeds)
    return len(row.grid.lrs) + (extensions if len(row.grid.lrs) > 1 else 0) + len(seeds) - 1


def _plan_row(plan: Plan, row: RowRecipe, seeds: Sequence[int], extensions: int, outcomes: Outcomes) -> None:
    known = {cell.lr: loss for cell, loss in outcomes.items() if cell.row == row.key and cell.seed == seeds[0]}
    tried = search(row.grid.lrs, extensions, known)
    cells = [CellKey(row.key, lr, seeds[0]) for lr in tried]
    pending = [cell for cell in cells if cell not in outcomes]
    plan.cells += cells
    plan.pending += pending
    if pending:
        plan.waiting += len(seeds) - 1
        return
    plan.chosen[row.key] = best = best_lr({lr: known[lr] for lr in tried})
    _plan_seeds(plan, row.key, best, seeds[1:], outcomes)


def _plan_seeds(plan: Plan, row: Row, lr: float | None, seeds: Sequence[int], outcomes: Outcomes) -> None:
    """Plan the trainings at a learning rate; ``None``: there is none that works; NaN: it is not known yet."""
    if lr is None:
        plan.chosen[row] = None
    elif math.isnan(lr):
        plan.waiting += len(seeds)
    else:
        plan.chosen[row] = lr
        cells = [CellKey(row, lr, seed) for seed in seeds]
        plan.cells += cells
        plan.pending += [cell for cell in cells if cell not in outcomes]


def search(lrs: Sequence[float], extensions: int, known: Mapping[float, float | None]) -> list[float]:
    """Learning rates to try: the list, and beyond its edges as long as the best one is at an edge.

    Args:
        lrs: the list.
        extensions: at most so many more, each further by the ratio of the last two at that edge.
        known: losses so far; ``None`` for diverged. If all diverged, the lowest counts as the best.

    Returns:
        Rising; the search is over if all of them are known.
    """
    tried = sorted(lrs)
    for _ in range(extensions if len(tried) > 1 else 0):
        if any(lr not in known for lr in tried):
            break
        best = best_lr({lr: known[lr] for lr in tried})
        if best is None or best == tried[0]:
            tried.insert(0, _rounded(tried[0] * tried[0] / tried[1], tried))
        elif best == tried[-1]:
            tried.append(_rounded(tried[-1] * tried[-1] / tried[-2], tried))
        else:
            break
    return tried


def best_lr(losses: Mapping[float, float | None]) -> float | None:
    """The learning rate of the lowest loss, the lower one of equals; ``None`` if all diverged."""
    finished = [(loss, lr) for lr, loss in losses.items() if loss is not None]
    return min(finished)[1] if finished else None


def _rounded(lr: float, tried: Sequence[float]) -> float:
    # 0.003 * 0.003 / 0.001 is 0.009000000000000001
    short = float(f"{lr:.3g}")
    return lr if short in tried else short
