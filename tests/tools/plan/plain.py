"""Modules without any code for plans or pipelines, and their data."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader


class Plain(L.LightningModule):
    """Module with a custom step and an ``nn.Sequential``, whose weights are allocated at once."""

    def __init__(self) -> None:
        super().__init__()
        self.model: nn.Module = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 1))

    def training_step(self, batch: dict[str, Tensor]) -> Any:
        loss = F.mse_loss(self.model(batch["x"]), batch["y"])
        self.log("train_loss", loss)
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 10)]


class AsItIs(Plain):
    """Module whose network does not say where it can be cut, and draws random numbers between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Attributes()


class Attributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.first(x).relu(), 0.1, self.training)
        return self.third(self.second(x))


class Pairs(L.LightningDataModule):
    """Data module whose batches are dictionaries; their shapes are known only by loading one."""

    def __init__(self, batch_size: int = 16) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader([{"x": torch.zeros(8), "y": torch.zeros(1)}] * 2 * self.batch_size, self.batch_size)


class Tokens(L.LightningDataModule):
    """Data module of random tokens, in batches of shape (batch_size, context_length + 1)."""

    def __init__(self, batch_size: int, context_length: int, vocab_size: int, batches: int = 8) -> None:
        super().__init__()
        self.batch_size, self.vocab_size, self.batches = batch_size, vocab_size, batches
        self.time = context_length + 1

    def example_batch(self) -> Tensor:
        return torch.zeros(self.batch_size, self.time, dtype=torch.int64)

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(3)
        tokens = torch.randint(self.vocab_size, (self.batch_size * self.batches, self.time), generator=generator)
        return DataLoader(tokens.tolist(), self.batch_size, collate_fn=torch.tensor)
