"""Runs a leg of a drawn chain on this rank, and tells what happened in it, and how much of that at every checkpoint."""

from __future__ import annotations

from typing import Any

import lightning as L
from torch.utils.data import DataLoader

from tests.trainer.checkpoint.resumable import NumberedSamples, Showing, training_loader
from tests.trainer.logging.evaluations import may_have_children
from tests.trainer.runs import Run, Watch, make_trainer, own_state, plain_metrics

Happened = dict[str, list[Any]]


class Counts(L.Callback):
    """Notes how much had happened when a checkpoint was saved, and when the batch after a step began, by step."""

    def __init__(self) -> None:
        self.at: dict[int, dict[str, int]] = {}
        self.after: dict[int, dict[str, int]] = {}

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        self.after.setdefault(trainer.global_step, _counts(trainer, module))

    def on_save_checkpoint(self, trainer: L.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        self.at[trainer.global_step] = _counts(trainer, module)


def happened(trainer: L.Trainer, module: Any) -> Happened:
    """What a run has done so far; ``numbers`` are of the samples in every micro-batch, on the last stage."""
    watch = next(c for c in trainer.callbacks if isinstance(c, Watch))  # type: ignore[attr-defined]
    records = list(trainer.logger.records)  # type: ignore[union-attr]
    return {
        "numbers": module.numbers, "records": records, "steps": watch.steps, "rates": watch.rates,
        "losses": watch.losses,
    }  # fmt: skip


def _counts(trainer: L.Trainer, module: Any) -> dict[str, int]:
    return {name: len(rows) for name, rows in happened(trainer, module).items()}


def fit_drawn(run: Run, loader: str, folder: str) -> dict[str, Any]:
    """Train, and report."""
    L.seed_everything(run.seed, verbose=False)
    module: Showing = run.module(run)  # type: ignore[assignment]
    counts = Counts()
    trainer = make_trainer(run, callbacks=[counts])
    vals = DataLoader(NumberedSamples(9, False), batch_size=4) if run.val_samples else None
    with may_have_children():
        trainer.fit(module, training_loader(run, loader, folder), vals, ckpt_path=run.ckpt_path)
    watch = next(c for c in trainer.callbacks if isinstance(c, Watch))  # type: ignore[attr-defined]
    return {
        "weights": watch.full or own_state(module), "happened": happened(trainer, module),
        "at": counts.at, "after": counts.after, "metrics": plain_metrics(trainer), "epoch": trainer.current_epoch,
        "step": trainer.global_step,
    }  # fmt: skip
