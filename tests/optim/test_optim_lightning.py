"""The optimizers where Lightning touches them: command line, wrappers, a Trainer run."""

from __future__ import annotations

from functools import partial

import lightning as L
import pytest
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


def parse(args):
    defaults = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    cli = LightningCLI(Module, run=False, args=args, save_config_callback=None, trainer_defaults=defaults)
    return cli.model.configure_optimizers()[0][0]


@pytest.fixture(autouse=True)
def _no_arguments_of_pytest(monkeypatch):
    monkeypatch.setattr("sys.argv", ["asyncpp"])


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(YAML)
    return f"--config={path}"


def test_nested_class_paths(config):
    optimizer = parse([config])
    assert isinstance(optimizer, ErrorFeedback)
    assert isinstance(optimizer.base, MuonAdamW)
    assert [g["lr"] for g in optimizer.param_groups] == [0.003]
    assert optimizer.param_groups[0]["newton_schulz_dtype"] == "float32"
    assert [g["param_names"] for g in optimizer.param_groups] == [["up.weight", "up.bias"]]


@pytest.mark.parametrize("base", [MuonAdamW, torch.optim.AdamW])
def test_trainer_run_equals_a_plain_loop(base, tmp_path):
    make = partial(ErrorFeedback, base=partial(base, lr=0.1))
    data = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    module = Module(make)
    monitor = LearningRateMonitor("step")
    logger = L.pytorch.loggers.CSVLogger(tmp_path)
    trainer = L.Trainer(
        max_epochs=3, accelerator="cpu", callbacks=[monitor], logger=logger, log_every_n_steps=1,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=4))

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
    if base is MuonAdamW:
        assert "lr-ErrorFeedback" in monitor.lrs


def test_a_fabric_wrapper_steps_and_loads():
    fabric = L.Fabric(accelerator="cpu", devices=1)
    module = nn.Linear(3, 2)
    optimizer = ErrorFeedback(module.named_parameters(), partial(MuonAdamW, newton_schulz_dtype="float32"))
    module, wrapped = fabric.setup(module, optimizer)
    module(torch.ones(1, 3)).sum().backward()
    wrapped.step()
    assert all("previous_step" in state for state in wrapped.state_dict()["state"].values())
    wrapped.load_state_dict(wrapped.state_dict())


def test_lightnings_own_optimizer_option_passes_parameters_without_names():
    class Plain(Module):
        configure_optimizers = L.LightningModule.configure_optimizers

    cli = LightningCLI(
        Plain,
        run=False,
        args=["--optimizer=lightning_asyncpp.optim.MuonAdamW", "--optimizer.lr=0.02"],
        save_config_callback=None,
        trainer_defaults={"logger": False, "enable_checkpointing": False, "accelerator": "cpu"},
    )
    optimizer = cli.model.configure_optimizers()
    optimizer.name_parameters({p: name for name, p in cli.model.named_parameters()})
    cli.model.training_step(torch.ones(2, 4), 0).backward()
    optimizer.step()
    assert [sorted(state) for state in optimizer.state.values()] == [
        ["momentum_buffer"],
        ["exp_avg", "exp_avg_sq", "step"],
    ]
