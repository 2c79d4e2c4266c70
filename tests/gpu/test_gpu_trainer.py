"""A Trainer whose stages share one GPU, started as a user starts it, equals a run in one process.

Its checkpoints are gathered from the GPU during the fit, and a run resumes from one of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.scripts import run, tensors_of

SCRIPT = """
import json, sys
import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from lightning_asyncpp import DelayedGradientStrategy, AsyncPipelineStrategy

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.RMSNorm(32), nn.Linear(32, 1))
    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.model(batch), batch.sum(1, keepdim=True))
    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.named_parameters(), lr=0.01, eps=1e-3)

device = torch.device("cuda:0")
how, folder = sys.argv[1:]
if how != "alone":
    strategy = AsyncPipelineStrategy(microbatches=4, parallel_devices=[device, device])
else:
    strategy = DelayedGradientStrategy("least", stages=2, microbatches=4)
generator = torch.Generator().manual_seed(0)
data = [torch.randn(16, 8, generator=generator) for _ in range(12)]
trainer = L.Trainer(
    strategy=strategy, devices=1, accelerator="cuda", max_epochs=2, logger=False, enable_progress_bar=False,
    callbacks=[ModelCheckpoint(f"{folder}/{how}", "{epoch}", save_top_k=-1)],
)
module = Module()
resumed = {"ckpt_path": f"{folder}/pipeline/epoch=0.ckpt"} if how == "resumed" else {}
trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None), **resumed)
state = module.state_dict() if how == "alone" else trainer.strategy.full_state_dict()
if trainer.is_global_zero:
    print("RESULT" + json.dumps({name: value.double().sum().item() for name, value in state.items()}))
"""


def test_two_stages_on_one_gpu(tmp_path: Path) -> None:
    pipeline, text = run(SCRIPT, tmp_path, "pipeline", str(tmp_path))
    alone, _ = run(SCRIPT, tmp_path, "alone", str(tmp_path))
    assert pipeline == pytest.approx(alone, abs=1e-4)
    assert "through the host, over sockets" in text
    for epoch in (0, 1):
        saved, expected = (
            tensors_of(torch.load(tmp_path / how / f"epoch={epoch}.ckpt", "cpu", weights_only=False))
            for how in ("pipeline", "alone")
        )
        assert sorted(saved) == sorted(expected)
        for name, value in expected.items():
            torch.testing.assert_close(saved[name], value, rtol=1e-3, atol=1e-4, msg=name)
    resumed, _ = run(SCRIPT, tmp_path, "resumed", str(tmp_path))
    assert resumed == pytest.approx(alone, abs=1e-4)
