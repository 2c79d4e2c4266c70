"""Curves of the validation loss over training time: how they are taken, and when each system reaches a target."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_asyncpp.tools.bench.names import SYNC
from lightning_asyncpp.tools.text import Spread

METRIC = "val_loss"


class LossClock(Callback):
    """Writes the curve of the validation loss over training time, as lists [step, seconds, loss] in JSON.

    The clock stands still while validations run. That a pipeline is emptied before, and fills up again after, counts.

    Args:
        file: to write, at the end of the training, by rank 0.
    """

    def __init__(self, file: str) -> None:
        self.file = Path(file)
        self.curve: list[tuple[int, float, float]] = []
        self._started = 0.0
        self._paused = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._started = time.perf_counter()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        self._paused = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note time and loss, and go on."""
        if trainer.sanity_checking:
            return
        seconds = self._paused - self._started
        self.curve.append((trainer.global_step, seconds, float(trainer.callback_metrics[METRIC])))
        self._started += time.perf_counter() - self._paused

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the curve."""
        if trainer.is_global_zero:
            self.file.write_text(json.dumps(self.curve))


Curve: TypeAlias = Sequence[tuple[int, float, float]]
"""Validations of a run in their order: step, seconds of training, loss."""


@dataclass(frozen=True)
class Reached:
    """When a run reached a target, interpolated between two validations.

    Attributes:
        steps: updates.
        seconds: of training.
    """

    steps: float
    seconds: float


@dataclass(frozen=True)
class TargetLine:
    """What the table says about a target; None where not every run reached it.

    Attributes:
        loss: the target.
        seconds: per system.
        steps: per system.
        speed_up: per asynchronous system: time of ``sync`` over its own, of the same seed.
    """

    loss: float
    seconds: dict[str, Spread | None]
    steps: dict[str, Spread | None]
    speed_up: dict[str, Spread | None]


def reach(curve: Curve, target: float) -> Reached | None:
    """When the loss first was ``target`` or less; None if it never was."""
    if curve and curve[0][2] <= target:
        return Reached(curve[0][0], curve[0][1])
    for (step, seconds, loss), (next_step, next_seconds, next_loss) in pairwise(curve):
        if next_loss <= target < loss:
            share = (loss - target) / (loss - next_loss)
            return Reached(step + share * (next_step - step), seconds + share * (next_seconds - seconds))
    return None


def common_targets(curves: Sequence[Curve], count: int = 4) -> list[float]:
    """Targets that all runs reached, evenly spread: from after a quarter of the steps to the best of the worst run.

    They are rounded up to hundredths; a narrow range gives fewer.
    """
    lowest = max(min(loss for _, _, loss in curve) for curve in curves)
    highest = max(curve[len(curve) // 4][2] for curve in curves)
    spread = [highest + (lowest - highest) * index / (count - 1) for index in range(count)]
    return sorted({math.ceil(loss * 100 - 1e-9) / 100 for loss in spread}, reverse=True)


def compare(curves: Mapping[str, Sequence[Curve]], targets: Sequence[float]) -> list[TargetLine]:
    """One line per target.

    Args:
        curves: of ``sync`` and the others: one per seed, in the same order.
        targets: losses.
    """
    lines = []
    for target in targets:
        reached = {system: [reach(curve, target) for curve in of_seeds] for system, of_seeds in curves.items()}
        seconds = {system: _spread([r.seconds if r else None for r in runs]) for system, runs in reached.items()}
        steps = {system: _spread([r.steps if r else None for r in runs]) for system, runs in reached.items()}
        ratios = {system: _ratios(reached[SYNC], runs) for system, runs in reached.items() if system != SYNC}
        lines.append(TargetLine(target, seconds, steps, {s: _spread(values) for s, values in ratios.items()}))
    return lines


def _ratios(syncs: Sequence[Reached | None], runs: Sequence[Reached | None]) -> list[float | None]:
    return [sync.seconds / own.seconds if sync and own else None for sync, own in zip(syncs, runs)]


def _spread(values: Sequence[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return Spread.of(known) if known and len(known) == len(values) else None
