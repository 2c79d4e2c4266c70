"""A training script that is started by a launcher, to be killed, stopped, told to end, or to fail by itself.

Arguments: the folder in which every rank writes its process id, the step at which it was told to end and the error that
ended it; where to raise; and the timeout of the strategy in seconds.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch

import lightning_asyncpp
from tests.helpers.trainer import Net, Run, Samples

MISTAKE = "the user's own mistake"
WHEN = 30  # a layer's forward, or a batch


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

    def on_exception(self, trainer: L.Trainer, module: Any, exception: BaseException) -> None:
        (self.folder / f"{trainer.global_rank}.step").write_text(str(trainer.global_step))


class Fails(Net):
    """Raises in a layer of the first stage, if that is asked for."""

    def __init__(self, where: str) -> None:
        super().__init__(Run(Net))
        self.forwards = 0
        if where == "layer":
            self.model[0].register_forward_hook(lambda *_: self._pass())  # type: ignore[index]

    def _pass(self) -> None:
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


def main() -> None:
    folder, where, timeout = sys.argv[1:]
    note_error(Path(folder))
    L.seed_everything(1)
    trainer = L.Trainer(
        accelerator="cpu", devices=3, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        strategy=lightning_asyncpp.AsyncPipelineStrategy(timeout=timedelta(seconds=float(timeout))),
        callbacks=[Reports(Path(folder), where)],
    )  # fmt: skip
    trainer.fit(Fails(where), torch.utils.data.DataLoader(Samples(80_000), batch_size=8))


if __name__ == "__main__":
    main()
