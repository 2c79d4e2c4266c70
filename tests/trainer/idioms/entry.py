"""One idiom: how it is written, and what is promised of it under a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L

from tests.helpers.trainer import Net, Run

WORKS, NOTE, REFUSED, NO = "works", "works, with a note", "refused", "no"


@dataclass(frozen=True)
class Idiom:
    """One row of ``docs/reference/idioms.md``.

    Attributes:
        code: as a user writes it.
        verdict: one of the four above.
        note: what a user should know; where it is refused or does not work, what to do instead.
        module: makes the LightningModule from the run.
        trainer: arguments of the Trainer.
        more: other fields of the run.
        options: of the strategy.
        says: where it is refused, a part of what is said.
        metrics: whether what it logs equals what ``delayed_gradient`` logs.
        epochs: to train.
        label: of the test, where the module or the arguments give none of their own.
    """

    code: str
    verdict: str
    note: str = ""
    module: Callable[[Run], L.LightningModule] = Net
    trainer: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    says: str = ""
    metrics: bool = True
    epochs: int = 2
    label: str = ""

    @property
    def name(self) -> str:
        """A name for the test."""
        own = "" if self.module is Net else getattr(self.module, "__name__", "")
        return self.label or own or "-".join([*self.trainer, *self.more]) or self.code[:30]

    def run(self) -> Run:
        """The run that it is tested with."""
        return Run(
            self.module, trainer={"max_epochs": self.epochs, **self.trainer}, **{"val_samples": (8,), **self.more}
        )
