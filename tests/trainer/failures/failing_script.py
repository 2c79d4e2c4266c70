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
WHEN = 30  # a layer's forward, a batch, or a step


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


class Fails(Net):
    """Raises in a layer of the first stage, or before a step of the middle one's optimizer."""

    def __init__(self, run: Run, where: str) -> None:
        super().__init__(run)
        self.where, self.passed = where, 0
        if where == "layer":
            self.model[0].register_forward_hook(lambda *_: self._pass())  # type: ignore[index]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        if self.where == "optimizer" and self.trainer.strategy.session.mesh.stage == 1:
            optimizer.register_step_pre_hook(lambda *_: self._pass())
        return optimizer

    def _pass(self) -> None:
        self.passed += 1
        if self.passed == WHEN:
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
    trainer = L.Trainer(
        accelerator="cpu", devices=3, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        strategy=lightning_asyncpp.AsyncPipelineStrategy(timeout=timedelta(seconds=float(timeout))),
        callbacks=[Reports(Path(folder), where)],
    )  # fmt: skip
    trainer.fit(Fails(Run(Net), where), torch.utils.data.DataLoader(Samples(80_000), batch_size=8))


if __name__ == "__main__":
    main()
