"""A training script that is started by a launcher, to be killed, stopped, told to end, or to fail by itself.

Arguments: the folder in which every rank writes its process id, its last step and the error that ended it; then,
optionally, where to raise, and the timeout of the strategy in seconds.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch

import lightning_asyncpp
from lightning_asyncpp.errors import PeerLostError
from tests.helpers.trainer import Net, Run, Samples

MISTAKE = "the user's own mistake"
WHEN = 30  # a layer's forward, a batch, a step, or a sample


class Reports(L.Callback):
    """Writes the process id when training runs, and at the end the step; raises on rank 0 if that is asked for."""

    def __init__(self, folder: Path, where: str) -> None:
        self.folder, self.where = folder, where

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        time.sleep(0.01)
        if index == 3:
            (self.folder / f"{trainer.global_rank}.tmp").write_text(str(os.getpid()))
            os.replace(self.folder / f"{trainer.global_rank}.tmp", self.folder / f"{trainer.global_rank}.pid")
        if self.where == "callback" and trainer.global_rank == 0 and index == WHEN:
            raise ArithmeticError(MISTAKE)
        if index == WHEN and self.where == "exits":
            sys.exit(0)
        if self.where == "stops" and index == WHEN:
            trainer.should_stop = True

    def on_exception(self, trainer: L.Trainer, module: Any, exception: BaseException) -> None:
        (self.folder / f"{trainer.global_rank}.step").write_text(f"{trainer.global_step} {type(exception).__name__}")


class FailingSGD(torch.optim.SGD):
    """Raises in a step, where it is told to."""

    fails = False
    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.fails and self.steps == WHEN:
            raise ArithmeticError(MISTAKE)
        return super().step(closure)


class FailingSamples(Samples):
    """Cannot be read to the end."""

    reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        if self.reads == 8 * WHEN:
            raise ArithmeticError(MISTAKE)
        return super().__getitem__(index)


class Fails(Net):
    """Raises in the loss, on the last stage, in a layer of the first or the middle stage, or in an optimizer."""

    def __init__(self, run: Run, where: str) -> None:
        super().__init__(run)
        self.where = where
        self.forwards = 0
        layer = {"layer": 0, "middle": 3}.get(where)
        if layer is not None:
            self.model[layer].register_forward_hook(lambda *_: self._late())  # type: ignore[index]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.where == "loss" and batch_idx == 9:
            raise ArithmeticError(MISTAKE)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = FailingSGD(self.parameters(), lr=0.01)
        optimizer.fails = self.where == "optimizer" and self.trainer.strategy.session.mesh.stage == 1
        return optimizer

    def _late(self) -> None:
        self.forwards += 1
        if self.forwards == WHEN:
            raise ArithmeticError(MISTAKE)


def note_error(folder: Path) -> None:
    """Let what ends this process, as the user sees it, be in a file of its own, too."""

    def hook(*error: Any) -> None:
        rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or "0"
        (folder / f"{rank}.error").write_text("".join(traceback.format_exception(*error)))
        sys.__excepthook__(*error)

    sys.excepthook = hook


def arguments() -> Iterator[str]:
    yield from sys.argv[1:]
    yield from ("nowhere", "600")[len(sys.argv) - 2 :]


def main() -> None:
    folder, where, timeout = arguments()
    note_error(Path(folder))
    L.seed_everything(1)
    if where in ("caught", "twice"):
        with suppress(ArithmeticError, PeerLostError):
            train(folder, "callback", timeout)
        where = {"caught": "stops", "twice": "layer"}[where]
    train(folder, where, timeout)


def train(folder: str, where: str, timeout: str) -> None:
    first_stage = where == "loader" and os.environ.get("LOCAL_RANK") == "2"
    samples = (FailingSamples if first_stage else Samples)(80_000)
    trainer = L.Trainer(
        accelerator="cpu", devices=3, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        strategy=lightning_asyncpp.AsyncPipelineStrategy(timeout=timedelta(seconds=float(timeout))),
        callbacks=[Reports(Path(folder), where)],
    )  # fmt: skip
    trainer.fit(Fails(Run(Net), where), torch.utils.data.DataLoader(samples, batch_size=8))


if __name__ == "__main__":
    main()
