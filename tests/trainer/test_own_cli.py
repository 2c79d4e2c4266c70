"""A user's own ``LightningCLI`` with ``--optimizer`` and ``--lr_scheduler``, on one stage and on several."""

from __future__ import annotations

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.pool import Pools
from tests.helpers.trainer import arrays


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])


class Data(L.LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x, x[:, :4].argmax(1)), 8)


def trained(arguments: list[str], devices: int) -> dict[str, np.ndarray]:
    options = ["accelerator=cpu", f"devices={devices}", "max_epochs=2"]
    options += [f"{name}=false" for name in ("logger", "enable_checkpointing", "enable_progress_bar")]
    options += ["strategy=lightning_asyncpp.SyncPipelineStrategy", "strategy.microbatches=2"]
    scheduler = ["--lr_scheduler=CosineAnnealingLR", "--lr_scheduler.T_max=3"]
    command = ["fit", "--seed_everything=1", *arguments, *scheduler, *(f"--trainer.{option}" for option in options)]
    cli = LightningCLI(Classifier, Data, args=command, save_config_callback=None)
    return arrays(cli.trainer.strategy.full_state_dict())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "optimizer",
    [
        ["--optimizer=AdamW", "--optimizer.lr=0.01"],
        ["--optimizer=lightning_asyncpp.optim.MuonAdamW", "--optimizer.newton_schulz_dtype=float32"],
    ],
    ids=["adamw", "muon"],
)
def test_optimizers_of_the_command_line(pools: Pools, optimizer: list[str]) -> None:
    (one,) = pools.run(1, trained, optimizer, 1)
    two = pools.run(2, trained, optimizer, 2)[0]
    for name, value in one.items():
        np.testing.assert_allclose(two[name], value, rtol=0, atol=1e-6, err_msg=name)
