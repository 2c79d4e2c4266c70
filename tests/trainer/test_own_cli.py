"""A user's own ``LightningCLI`` with ``--optimizer``, in processes of its own, on one stage and on several."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.pool import elastic_environment, free_port
from tests.helpers.programs import run_ranks

SCRIPT = """
import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_asyncpp


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])


class Data(L.LightningDataModule):
    def train_dataloader(self):
        x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x, x[:, :4].argmax(1)), 8)


if __name__ == "__main__":
    cli = LightningCLI(Net, Data)
    cli.trainer.save_checkpoint("end.ckpt")
"""
ADAMW = ["--optimizer=AdamW", "--optimizer.lr=0.01"]
MUON = ["--optimizer=lightning_asyncpp.optim.MuonAdamW", "--optimizer.newton_schulz_dtype=float32"]


def trained(folder: Path, optimizer: list[str], strategy: list[str], devices: int) -> dict[str, torch.Tensor]:
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)  # as a user has it: beside nothing
    options = ["accelerator=cpu", "max_epochs=2", "logger=false", "enable_progress_bar=false", *strategy]
    scheduler = ["--lr_scheduler=CosineAnnealingLR", "--lr_scheduler.T_max=3"]
    command = ["train.py", "fit", "--seed_everything=1", *optimizer, *scheduler]
    command += [f"--trainer.{option}" for option in (*options, f"devices={devices}", "enable_model_summary=false")]
    port = free_port()
    environments = [elastic_environment(rank, devices, port) for rank in range(devices)] if devices > 1 else [{}]
    for ended in run_ranks(command, folder, environments):
        assert ended.returncode == 0, ended.stderr[-3000:]
    saved: dict[str, torch.Tensor] = torch.load(folder / "end.ckpt", weights_only=True)["state_dict"]
    return saved


# A plain Trainer gives Muon no names, but one stage of a pipeline does.
@pytest.mark.parametrize("optimizer", [ADAMW, pytest.param(MUON, marks=pytest.mark.slow)], ids=["adamw", "muon"])
def test_optimizers_of_the_command_line(tmp_path: Path, optimizer: list[str]) -> None:
    sync = ["strategy=lightning_asyncpp.SyncPipelineStrategy", "strategy.microbatches=2"]
    found = trained(tmp_path / "stages", optimizer, sync, 2)
    expected = trained(tmp_path / "one", optimizer, sync if optimizer is MUON else [], 1)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)
