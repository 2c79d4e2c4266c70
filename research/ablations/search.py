"""Which trainings an ablation needs next: the search of a row's learning rate, then its further seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from research.ablations.recipe import Arm
from research.ablations.rows import UNCORRECTED, Key, Row


@dataclass
class Plan:
    """Trainings to run.

    Attributes:
        needed: all trainings that are known to be needed, in order: the first seed of every row before the second of
            any, so that a grid which is cut short has all of its rows.
        chosen: the learning rate of every row whose search is over; None if all diverged.
        waiting: number of trainings that will be needed once a learning rate is chosen.
    """

    needed: list[Key] = field(default_factory=list)
    chosen: dict[Row, float | None] = field(default_factory=dict)
    waiting: int = 0

    def add(self, row: Row, lr: float | None, seeds: Sequence[int]) -> None:
        """Plan the seeds of a row at its learning rate."""
        self.chosen[row] = lr
        if lr is not None:
            self.needed += [Key(row, lr, seed) for seed in seeds]


def make_plan(arms: Iterable[Arm], seeds: Sequence[int], extensions: int, losses: Mapping[Key, float]) -> Plan:
    """Find the trainings that the arms need.

    Args:
        arms: with every one whose learning rate another one uses.
        seeds: the first one searches.
        extensions: at most so many learning rates beyond the list, per row.
        losses: of what is over; NaN where it diverged.
    """
    plan = Plan()
    for arm in sorted(arms, key=lambda arm: arm.same_lr):  # those that use the learning rate of others come last
        if arm.same_lr:
            leader = arm.row._replace(correction=UNCORRECTED)
            if leader in plan.chosen:
                plan.add(arm.row, plan.chosen[leader], seeds)
            else:
                plan.waiting += len(seeds)
            continue
        known = {key.lr: loss for key, loss in losses.items() if key.row == arm.row and key.seed == seeds[0]}
        tried = learning_rates(arm.lrs, extensions, known)
        plan.needed += [Key(arm.row, lr, seeds[0]) for lr in tried]
        if all(lr in known for lr in tried):
            plan.add(arm.row, best_lr({lr: known[lr] for lr in tried}), seeds[1:])
        else:
            plan.waiting += len(seeds) - 1
    plan.needed.sort(key=lambda key: seeds.index(key.seed))
    return plan


def learning_rates(lrs: Iterable[float], extensions: int, known: Mapping[float, float]) -> list[float]:
    """Return the learning rates to try: the list, and beyond its edges as long as the best one is at an edge.

    Args:
        lrs: the list.
        extensions: at most so many more, each further by the ratio of the last two at that edge.
        known: losses so far; NaN for diverged. If all diverged, the lowest counts as the best.

    Returns:
        Rising; the search is over if all of them are known.
    """
    tried = sorted(lrs)
    for _ in range(extensions if len(tried) > 1 else 0):
        if any(lr not in known for lr in tried):
            break
        best = best_lr({lr: known[lr] for lr in tried})
        if best is None or best == tried[0]:
            tried.insert(0, float(f"{tried[0] * tried[0] / tried[1]:.3g}"))
        elif best == tried[-1]:
            tried.append(float(f"{tried[-1] * tried[-1] / tried[-2]:.3g}"))
        else:
            break
    return tried


def best_lr(losses: Mapping[float, float]) -> float | None:
    """Return the learning rate of the lowest loss, the lower one of equals; None if all diverged."""
    finished = [(loss, lr) for lr, loss in losses.items() if not math.isnan(loss)]
    return min(finished)[1] if finished else None
