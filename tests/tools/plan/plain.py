"""Modules that know nothing of plans or pipelines, and their data."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader


class Plain(L.LightningModule):
    """An ``nn.Sequential`` with weights for real, and a step of its own."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 1))

    def training_step(self, batch: dict[str, Tensor]) -> Any:
        loss = F.mse_loss(self.model(batch["x"]), batch["y"])
        self.log("train_loss", loss)
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 10)]


class Deep(Plain):
    """Its second argument has another name, which Lightning allows."""

    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 64), *(nn.Linear(64, 64) for _ in range(layers - 2)), nn.Linear(64, 1))

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        return F.mse_loss(self.model(batch["x"]), batch["y"])


class AsItIs(Plain):
    """Its network does not say where it can be cut, and draws random numbers between its layers."""

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


class Manual(Plain):
    """Steps by itself, which no pipeline does."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Values(Plain):
    """Looks at values while it is built, as many models do that grow a rate with the depth."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [float(rate) for rate in torch.linspace(0, 0.1, 4)]


class Pairs(L.LightningDataModule):
    """Batches of dictionaries, known by loading one."""

    def __init__(self, batch_size: int = 16) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader([{"x": torch.zeros(8), "y": torch.zeros(1)}] * 2 * self.batch_size, self.batch_size)
