"""A script that no rank can run shows one traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import lightning as L, torch
from torch import nn
import lightning_asyncpp

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        self.outside = nn.Parameter(torch.ones(1))

    def training_step(self, batch):
        return self.model(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 2)), batch_size=4)

trainer = L.Trainer(accelerator="cpu", devices=2, strategy="async_pipeline", logger=False, enable_progress_bar=False)
trainer.fit(Module())
"""


def test_it_says_so_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    environment.pop("ASYNCPP_TRACEBACK", None)
    done = subprocess.run(
        [sys.executable, "train.py"], capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment
    )
    assert done.returncode
    assert done.stderr.count("Traceback") == 1, done.stderr
    said = [line for line in done.stderr.splitlines() if "parameters outside the layers of self.model: outside" in line]
    full, *others = sorted(said)
    assert full.startswith("[rank0]: ")
    assert full.endswith("freeze them (requires_grad=False)")
    assert all(line.startswith("[rank1]: as on rank 0, ConfigurationError: ") for line in others), said
