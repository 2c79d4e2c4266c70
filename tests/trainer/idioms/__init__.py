"""Idioms of Lightning's documentation, each as a module or as arguments of a run: the rows of the page about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L

from tests.helpers.trainer import Net, Run

SAMPLES = 24  # three batches


@dataclass(frozen=True)
class Idiom:
    """Rows of ``docs/reference/idioms.md`` that one run tests.

    Attributes:
        rows: of each row a part that no other has, between bars.
        module: makes the LightningModule from the run.
        trainer: arguments of the Trainer.
        says: where it is refused, a part of what is said.
        metrics: whether what it logs equals what ``delayed_gradient`` logs.
        processes: whether it is tested over processes, because ranks might differ.
    """

    rows: str
    module: Callable[[Run], L.LightningModule] = Net
    trainer: dict[str, Any] = field(default_factory=dict)
    says: str = ""
    metrics: bool = True
    processes: bool = False

    def run(self, **more: Any) -> Run:
        """The run that it is tested with."""
        return Run(self.module, trainer={"max_epochs": 2, **self.trainer}, samples=SAMPLES, val_samples=(8,), **more)
