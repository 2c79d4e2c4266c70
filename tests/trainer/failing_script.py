"""A training script that is started by a launcher, to be killed, told to end, or to fail by itself.

Arguments: the folder in which every rank writes its process id and its last step, and optionally where to raise.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch

import lightning_asyncpp  # noqa: F401  (registers the strategies)
from tests.trainer.runs import Net, Run, Samples


class Reports(L.Callback):
    """Writes the process id when training runs, and at the end the step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        time.sleep(0.01)
        if index == 3:
            (self.folder / f"{trainer.global_rank}.tmp").write_text(str(os.getpid()))
            os.replace(self.folder / f"{trainer.global_rank}.tmp", self.folder / f"{trainer.global_rank}.pid")

    def on_exception(self, trainer: L.Trainer, module: Any, exception: BaseException) -> None:
        (self.folder / f"{trainer.global_rank}.step").write_text(f"{trainer.global_step} {type(exception).__name__}")


class Fails(Net):
    """Raises in the loss, on the last stage, or in a layer of the first one."""

    def __init__(self, run: Run, where: str) -> None:
        super().__init__(run)
        self.where = where
        if where == "layer":
            self.model[0].register_forward_hook(lambda *_: self._raise_late())  # type: ignore[index]
        self.forwards = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.where == "loss" and batch_idx == 9:
            raise ArithmeticError("the user's own mistake")
        return loss

    def _raise_late(self) -> None:
        self.forwards += 1
        if self.forwards == 30:
            raise ArithmeticError("the user's own mistake")


def main() -> None:
    folder, where = Path(sys.argv[1]), sys.argv[2]
    L.seed_everything(1)
    loader = torch.utils.data.DataLoader(Samples(80_000), batch_size=8)
    trainer = L.Trainer(
        accelerator="cpu", devices=3, strategy="async_pipeline", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, callbacks=[Reports(folder)],
    )  # fmt: skip
    trainer.fit(Fails(Run(Net), where), loader)


if __name__ == "__main__":
    main()
