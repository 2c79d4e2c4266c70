"""The optimizers where Lightning touches them: the command line, and a Trainer run."""

from __future__ import annotations

from functools import partial

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.cli import LightningCLI, OptimizerCallable
from torch import nn
from torch.utils.data import DataLoader

from lightning_asyncpp.optim import ErrorFeedback, MuonAdamW

YAML = """
model:
  optimizer:
    class_path: lightning_asyncpp.optim.ErrorFeedback
    init_args:
      base:
        class_path: lightning_asyncpp.optim.MuonAdamW
        init_args: {lr: 0.003, newton_schulz_dtype: float32}
"""


class Module(L.LightningModule):
    def __init__(self, optimizer: OptimizerCallable = torch.optim.AdamW):
        super().__init__()
        self.optimizer = optimizer
        self.up = nn.Linear(4, 6)

    def training_step(self, batch, batch_idx):
        return self.up(batch).square().mean()

    def configure_optimizers(self):
        optimizer = self.optimizer(self.named_parameters())
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))]


def test_nested_class_paths(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["asyncpp"])
    (tmp_path / "config.yaml").write_text(YAML)
    cli = LightningCLI(Module, run=False, args=[f"--config={tmp_path}/config.yaml"], save_config_callback=None)
    optimizer = cli.model.configure_optimizers()[0][0]
    assert (type(optimizer), type(optimizer.base)) == (ErrorFeedback, MuonAdamW)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["newton_schulz_dtype"]) == (0.003, "float32")
    assert group["param_names"] == ["up.weight", "up.bias"]


def test_a_trainers_run_equals_a_plain_loop(tmp_path):
    make = partial(ErrorFeedback, base=partial(MuonAdamW, lr=0.1))
    data = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    module = Module(make)
    monitor = LearningRateMonitor("step")
    trainer = L.Trainer(
        max_epochs=3, accelerator="cpu", callbacks=[monitor], logger=L.pytorch.loggers.CSVLogger(tmp_path),
        log_every_n_steps=1, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=4))
    assert "lr-ErrorFeedback" in monitor.lrs

    torch.manual_seed(0)
    plain = Module(make)
    (optimizer,), (scheduler,) = plain.configure_optimizers()
    for _ in range(3):
        for batch in data.split(4):
            optimizer.zero_grad()
            plain.training_step(batch, 0).backward()
            optimizer.step()
        scheduler.step()
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), plain.parameters()))
