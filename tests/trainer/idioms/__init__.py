"""Idioms of Lightning's documentation as modules or Trainer arguments, for the rows of ``docs/reference/idioms.md``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L

from tests.helpers.trainer import Net, Run

SAMPLES = 24  # three batches


@dataclass(frozen=True)
class Idiom:
    """Rows of ``docs/reference/idioms.md`` that are tested by one run.

    Attributes:
        rows: for each row a part that no other row has, separated by bars.
        module: function that makes the LightningModule from the run.
        trainer: Trainer arguments.
        says: part of the error message, if the idiom is refused.
        metrics: whether its metrics equal those of ``delayed_gradient``.
        processes: whether it is tested over processes, because ranks might differ.
    """

    rows: str
    module: Callable[[Run], L.LightningModule] = Net
    trainer: dict[str, Any] = field(default_factory=dict)
    says: str = ""
    metrics: bool = True
    processes: bool = False

    def run(self, **more: Any) -> Run:
        """Return the run that tests the idiom."""
        return Run(self.module, trainer={"max_epochs": 2, **self.trainer}, samples=SAMPLES, val_samples=(8,), **more)
