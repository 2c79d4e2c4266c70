"""A training step through the Trainer calls few functions of this package; its cost is counted in calls, not seconds.

Calls of Python functions, and the files of these functions, are counted from the start of one batch to the start of
the next. How often a stage polls for messages depends on the machine, so the cheapest of several batches is checked.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_asyncpp
from tests.helpers.pool import Pools
from tests.helpers.trainer import Run, make_trainer

MOST_FILES, MOST_CALLS = 19, 460
BATCHES, WARMUP = 16, 6
PACKAGE = str(Path(lightning_asyncpp.__file__).parent)


class Plain(L.LightningModule):
    """Module of linear layers."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class CountCalls(L.Callback):
    """Callback that counts the calls of this package's functions by file, from the start of a batch to the next one."""

    def __init__(self) -> None:
        self.batches: list[Counter[str]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        sys.setprofile(None)
        self.batches.append(Counter())
        sys.setprofile(self._note)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.batches[-1][frame.f_code.co_filename] += 1


def calls_of_a_step(run: Run) -> Counter[str]:
    """Return the calls by file of the cheapest batch between the first ones and the last, which drain the pipeline."""
    counting = CountCalls()
    trainer = make_trainer(run, callbacks=[counting])
    trainer.fit(run.module(run), DataLoader(torch.randn(8 * BATCHES, 8), batch_size=8))
    return min(counting.batches[WARMUP:-2], key=Counter.total)


def test_a_step_of_a_stage_and_of_one_process(pools: Pools) -> None:
    stages = pools.run(2, calls_of_a_step, Run(Plain, "default", {"microbatches": 4}))
    for calls in (*stages, calls_of_a_step(Run(Plain, "delayed", {"microbatches": 4}))):
        assert calls.total() > 200, "nothing was counted"
        assert calls.total() <= MOST_CALLS, calls.most_common()
        assert len(calls) <= MOST_FILES, calls.most_common()
