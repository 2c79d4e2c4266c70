"""Modules that a pipeline cannot run, each with the mistake in its name."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.helpers.cases import DIM
from tests.helpers.trainer import Net, Run, Samples


class TwoOptimizers(Net):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.model.parameters(), 0.1), torch.optim.SGD(self.model.parameters(), 0.1)]


class CallsTwice(Net):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + super().training_step(batch, batch_idx)


class NeverCalls(Net):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return batch["x"].sum()


class OtherOrder(Net):
    """Shuffles by a generator of the process's own."""

    def train_dataloader(self) -> Any:
        own = torch.Generator().manual_seed(self.global_rank)  # the mistake
        return DataLoader(Samples(40), batch_size=8, shuffle=True, generator=own)


class OtherRate(Net):
    """Has a learning rate of the process's own."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1 * (1 + self.global_rank))


class OtherSize(Net):
    """Has a layer of another size in one process."""

    def configure_model(self) -> None:
        if self.global_rank == 1:
            self.model = nn.Sequential(*list(self.model)[:-1], nn.Linear(DIM, 2))


class ReturnsNone(Net):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)


class Named(NamedTuple):
    x: Tensor


class ReturnsNamedTuple(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return Named(super().forward(x))


class NamedTupleAtTheCut(Net):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model = nn.Sequential(ReturnsNamedTuple(DIM, DIM), nn.Linear(DIM, 1))


class ValidatesOnOneStage(Net):
    """Fails on the first stage alone, before the model is called."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        if self.trainer.global_rank == self.trainer.world_size - 1:
            raise LookupError("no such column" + " in the table" * 100)
        super().validation_step(batch, batch_idx, dataloader_idx)


class CompiledInPlace(Net):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model.compile(backend="eager")
