"""The learning rate of an update: a linear warm-up, and what follows it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import lightning as L

Decay = Literal["cosine", "wsd", "constant"]
_COOL_DOWN = 0.2
"""Of the updates after the warm-up, those in which a learning rate that was constant falls."""


def schedule_problems(warmup_steps: int, decay: str, min_lr_ratio: float, total_steps: int | None) -> list[str]:
    """What is wrong with the arguments of a schedule, a text each."""
    problems = []
    if warmup_steps < 0:
        problems.append(f"warmup_steps={warmup_steps!r}: must be at least 0")
    if decay not in ("cosine", "wsd", "constant"):
        problems.append(f"decay={decay!r}: must be 'cosine', 'wsd' or 'constant'")
    if not 0 <= min_lr_ratio <= 1:
        problems.append(f"min_lr_ratio={min_lr_ratio!r}: must be between 0 and 1")
    if total_steps is not None and total_steps <= warmup_steps:
        problems.append(f"total_steps={total_steps!r}: must be above warmup_steps={warmup_steps!r}")
    return problems


def learning_rate_factor(warmup: int, decay: str, least: float, total: int | None) -> Callable[[int], float]:
    """Return the learning rate of an update as a share of the optimizer's; updates count from 0.

    Args:
        warmup: updates over which it rises linearly.
        decay: ``"cosine"``, ``"wsd"`` or ``"constant"``.
        least: last learning rate of the decay, as a share of the highest.
        total: number of the last update of the decay; ``None`` for a constant one.
    """

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if total is None:
            return 1.0
        progress = min(1.0, (step - warmup) / max(1, total - warmup))
        falls = {"wsd": min(1.0, (1 - progress) / _COOL_DOWN), "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
        return least + (1 - least) * falls[decay]

    return factor


def last_step(trainer: L.Trainer, decay: str) -> int:
    """Number of updates of a run: ``max_steps``, or else ``max_epochs`` times the batches of an epoch.

    Raises:
        ValueError: it has no end.
    """
    steps = trainer.max_steps if trainer.max_steps > 0 else trainer.estimated_stepping_batches
    if not math.isfinite(steps) or steps <= 0:
        raise ValueError(f"decay={decay!r} needs an end: set total_steps, or max_steps of the Trainer; or 'constant'")
    return int(steps)
