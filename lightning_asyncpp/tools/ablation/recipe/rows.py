"""Which trainings an ablation needs next, given what is known: the search of the learning rate, then the seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_asyncpp.tools.ablation.recipe.recipe import Correction, Delay, OptimizerGrid, Recipe


class RowKey(NamedTuple):
    """Identity of a row, as in the tables."""

    optimizer: str
    correction: str
    delay: str
    stages: str
    momentum: str


class CellKey(NamedTuple):
    """Identity of a training."""

    row: RowKey
    lr: float
    seed: int


@dataclass(frozen=True)
class Row:
    """Trainings that differ in learning rate and seed only."""

    grid: OptimizerGrid
    momentum: float | None
    delay: Delay
    correction: Correction

    @property
    def key(self) -> RowKey:
        """Its identity."""
        momentum = "" if self.momentum is None else f"{self.momentum:.12g}"
        return RowKey(self.grid.name, self.correction.name, self.delay.text, self.delay.stages, momentum)

    @property
    def name(self) -> str:
        """A name to read and to match."""
        key = self.key
        delay = f"delay{key.delay}".replace(" ", "-") + (f"-stages{key.stages}" if key.stages else "")
        momentum = [f"momentum{key.momentum}"] if key.momentum else []
        return "_".join([key.optimizer, *momentum, delay, key.correction])


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
    chosen: dict[RowKey, float | None] = field(default_factory=dict)
    waiting: int = 0

    @property
    def total(self) -> int:
        """Number of trainings as far as it can be known."""
        return len(self.cells) + self.waiting


Outcomes = Mapping[CellKey, float | None]
"""The loss of every training that is over; ``None`` if it diverged."""


def make_rows(recipe: Recipe) -> list[Row]:
    """List the rows of a recipe; a correction has nothing to correct at delay 0, and would repeat the row without."""
    rows = []
    for grid in recipe.optimizers:
        for momentum in grid.momentum.values if grid.momentum else (None,):
            for delay in recipe.delays:
                for correction in grid.corrections:
                    if correction.config is None or not delay.is_fresh:
                        rows.append(Row(grid, momentum, delay, correction))
    return rows


def make_plan(rows: Sequence[Row], seeds: Sequence[int], extensions: int, outcomes: Outcomes) -> Plan:
    """Find what the rows need.

    Args:
        rows: with every row whose learning rate another one of them uses.
        seeds: the first one searches.
        extensions: at most so many learning rates beyond the list, per row.
        outcomes: what is over.
    """
    plan = Plan()
    leaders = {leader_of(row.key): row.key for row in rows if row.correction.config is None}
    # Rows that use the learning rate of others come after them, whatever their order in the recipe.
    for row in sorted(rows, key=lambda row: row.correction.same_lr):
        if row.correction.same_lr:
            _plan_seeds(plan, row.key, plan.chosen.get(leaders[leader_of(row.key)], math.nan), seeds, outcomes)
        else:
            _plan_row(plan, row, seeds, extensions, outcomes)
    order = {row.key: index for index, row in enumerate(rows)}
    plan.cells.sort(key=lambda cell: order[cell.row])
    plan.pending.sort(key=lambda cell: order[cell.row])
    return plan


def leader_of(row: RowKey) -> RowKey:
    """What a row has in common with the same row under other corrections."""
    return row._replace(correction="")


def with_leaders(rows: Sequence[Row], wanted: Callable[[Row], bool]) -> list[Row]:
    """The wanted rows and those whose learning rate they use."""
    kept = [row for row in rows if wanted(row)]
    led = {leader_of(row.key) for row in kept if row.correction.same_lr}
    return [r for r in rows if r in kept or (r.correction.config is None and leader_of(r.key) in led)]


def most_cells(row: Row, seeds: Sequence[int], extensions: int) -> int:
    """Most trainings that a row can need."""
    if row.correction.same_lr:
        return len(seeds)
    return len(row.grid.lrs) + (extensions if len(row.grid.lrs) > 1 else 0) + len(seeds) - 1


def _plan_row(plan: Plan, row: Row, seeds: Sequence[int], extensions: int, outcomes: Outcomes) -> None:
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


def _plan_seeds(plan: Plan, row: RowKey, lr: float | None, seeds: Sequence[int], outcomes: Outcomes) -> None:
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
