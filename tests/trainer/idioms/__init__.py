"""Idioms of Lightning's documentation, each as a module or as arguments of a run, with what becomes of it here."""

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
        callbacks: of the run.
        says: where it is refused, a part of what is said.
        metrics: whether what it logs equals what ``delayed_gradient`` logs.
        processes: whether it is tested over processes, because ranks might differ.
    """

    code: str
    verdict: str
    note: str = ""
    module: Callable[[Run], L.LightningModule] = Net
    trainer: dict[str, Any] = field(default_factory=dict)
    callbacks: tuple[Callable[..., L.Callback], ...] = ()
    says: str = ""
    metrics: bool = True
    processes: bool = False

    @property
    def name(self) -> str:
        """A name for the test."""
        return self.code if self.module is Net else self.module.__name__

    def run(self, **more: Any) -> Run:
        """The run that it is tested with."""
        callbacks = tuple((make, {}) for make in self.callbacks)
        return Run(
            self.module, trainer={"max_epochs": 2, **self.trainer}, callbacks=callbacks, val_samples=(8,), **more
        )
