"""Optimizers of somebody else, and stages that train nothing, through the Trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytorch_optimizer
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_asyncpp.optim import ErrorFeedback, MuonAdamW
from tests.helpers.oracle import assert_equal_weights, joined_weights
from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, delayed, fit, train


class Looks(nn.Embedding):
    def forward(self, x: Any) -> Any:
        return super().forward((x.abs() * 3).long().clamp(0, 3)).mean(1)


class Filtered(Net):
    """Trains the last layers only, as after ``get_peft_model``."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        layers = list(self.model.children())
        part = layers[:-1] if run.optimizer != "sgd" else layers[1:]
        for layer in part:
            layer.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        if self.run.optimizer == "muon":
            trained = [(n, p) for n, p in self.named_parameters() if p.requires_grad]
            optimizer: Any = ErrorFeedback(trained, lambda named: MuonAdamW(named, lr=0.02))
        else:
            optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, self.parameters()), lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.0 / (1 + 0.3 * t))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Grouped(Filtered):
    """Groups by decay; both are empty on stages that train nothing, one on others."""

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        matrices = {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1}
        return torch.optim.AdamW(
            [matrices, {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0}], lr=0.01
        )


@pytest.mark.parametrize(
    ("module", "optimizer", "stages"),
    [
        pytest.param(Filtered, "adamw", 2, marks=pytest.mark.slow),
        (Filtered, "sgd", 3),
        pytest.param(Filtered, "muon", 2, marks=pytest.mark.slow),
        (Grouped, "adamw", 3),
        pytest.param(Filtered, "adamw", 3, marks=pytest.mark.slow),
        pytest.param(Filtered, "sgd", 2, marks=pytest.mark.slow),
        pytest.param(Filtered, "muon", 3, marks=pytest.mark.slow),
        pytest.param(Grouped, "adamw", 2, marks=pytest.mark.slow),
    ],
)
def test_stages_that_train_nothing(pools: Pools, module: Any, optimizer: str, stages: int, tmp_path: Path) -> None:
    """They go on from a checkpoint, too, cut in another way."""
    saves = (ModelCheckpoint, {"dirpath": tmp_path, "save_top_k": -1, "filename": "{step}"})
    trainer = {"max_epochs": 2, "gradient_clip_val": 0.3}
    run = Run(module, options={"microbatches": 3}, optimizer=optimizer, trainer=trainer)
    saved = replace(run, callbacks=(saves,), trainer={**trainer, "enable_checkpointing": True})
    whole = joined_weights(pools.run(stages, fit, saved), stages)
    assert_equal_weights(train(delayed(run, delay=1, microbatches=3))["weights"], whole)
    resumed = replace(run, ckpt_path=str(tmp_path / "step=5.ckpt"))
    again = 5 - stages
    assert_equal_weights(joined_weights(pools.run(again, fit, resumed), again), whole)


class ScheduleFree(Net):
    """With the modes that its authors ask for; a wrapper around it and without."""

    def configure_optimizers(self) -> Any:
        if self.run.error_feedback:
            return ErrorFeedback(self.parameters(), lambda p: pytorch_optimizer.ScheduleFreeAdamW(p, lr=0.01))
        return pytorch_optimizer.ScheduleFreeAdamW(self.parameters(), lr=0.01)

    def on_train_start(self) -> None:
        self.optimizers().optimizer.train()

    def on_validation_epoch_start(self) -> None:
        if not self.trainer.sanity_checking:
            self.optimizers().optimizer.eval()

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.optimizers().optimizer.train()


@pytest.mark.parametrize(("stages", "feedback"), [(3, True), pytest.param(2, False, marks=pytest.mark.slow)])
def test_schedule_free(pools: Pools, stages: int, feedback: bool, tmp_path: Path) -> None:
    saves = (
        ModelCheckpoint,
        {"dirpath": tmp_path, "save_top_k": -1, "filename": "{step}", "save_on_train_epoch_end": True},
    )
    trainer = {"max_epochs": 3, "logger": "list"}
    run = Run(ScheduleFree, options={"microbatches": 3}, val_samples=(9,), error_feedback=feedback, trainer=trainer)
    saved = replace(run, callbacks=(saves,), trainer={**trainer, "enable_checkpointing": True})
    results = pools.run(stages, fit, saved)
    whole = joined_weights(results, stages)
    emulated = train(delayed(run, delay=1, microbatches=3))
    assert_equal_weights(emulated["weights"], whole)
    assert emulated["callback_metrics"]["val_loss"] == pytest.approx(
        results[0]["callback_metrics"]["val_loss"], rel=1e-5
    )
    again = pools.run(stages, fit, replace(run, ckpt_path=str(tmp_path / "step=5.ckpt")))
    assert_equal_weights(joined_weights(again, stages), whole)
