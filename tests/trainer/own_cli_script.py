"""A user's own script: ``python own_cli_script.py fit --optimizer=AdamW --trainer.strategy=async_pipeline ...``."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_asyncpp  # noqa: F401


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])


class Data(L.LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(48, 8, generator=generator)
        return DataLoader(TensorDataset(x, x[:, :4].argmax(1)), 8)


if __name__ == "__main__":
    cli = LightningCLI(Net, Data)
    cli.trainer.save_checkpoint("end.ckpt")
