"""A training step through the Trainer runs few functions of this package: what it costs is seen here, not in seconds.

Calls of Python functions are counted, and the files that they are in, from the start of one batch to that of the next.
How often a stage looks for what has not arrived depends on the machine, so the cheapest of several batches counts.
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
    """Linear layers alone."""

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
    """Counts from the start of a batch to that of the next: calls of this package's functions in each of its files."""

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
    """In each file, in a batch in the middle: the last ones drain the pipeline."""
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
