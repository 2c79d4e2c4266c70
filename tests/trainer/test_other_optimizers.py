"""Third-party optimizers, and stages without trained parameters, work with the Trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_optimizer
import torch

from lightning_asyncpp.optim import ErrorFeedback, MuonAdamW
from tests.helpers.oracle import assert_equal_weights, joined_weights
from tests.helpers.pool import Pools
from tests.helpers.resumable import saving
from tests.helpers.trainer import Net, Run, fit, staged, train


class Filtered(Net):
    """Module that trains only its last or only its first layer; the rest is frozen, as after ``get_peft_model``."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        layers = list(self.model.children())
        for layer in layers[:-1] if run.optimizer != "sgd" else layers[1:]:
            layer.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        trained = [(n, p) for n, p in self.named_parameters() if p.requires_grad]
        if self.run.optimizer == "muon":
            optimizer: Any = ErrorFeedback(trained, lambda named: MuonAdamW(named, lr=0.02))
        else:  # both groups are empty on stages that train nothing
            matrices = {"params": [p for _, p in trained if p.ndim > 1], "weight_decay": 0.1}
            optimizer = torch.optim.AdamW([matrices, {"params": [p for _, p in trained if p.ndim <= 1]}], lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.0 / (1 + 0.3 * t))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize("optimizer", [pytest.param("sgd", marks=pytest.mark.slow), "muon"])
def test_stages_that_train_nothing(pools: Pools, optimizer: str, tmp_path: Path) -> None:
    """Stages without trained parameters train as one stage does, also after a resume with another cut."""
    trainer = {"max_epochs": 2, "gradient_clip_val": 0.3, "enable_checkpointing": True}
    run = Run(Filtered, options={"microbatches": 3}, optimizer=optimizer, trainer=trainer, samples=24)
    whole = train(staged(replace(run, callbacks=(saving(tmp_path, every_n_train_steps=3),)), 1))["weights"]
    assert_equal_weights(joined_weights(pools.run(3, fit, run), 3), whole)
    resumed = pools.run(2, fit, replace(run, ckpt_path=str(tmp_path / "step=3.ckpt")))
    assert_equal_weights(joined_weights(resumed, 2), whole)


class ScheduleFree(Net):
    """Module with a wrapped schedule-free optimizer; hooks set its modes, as its authors require."""

    def configure_optimizers(self) -> Any:
        return ErrorFeedback(self.parameters(), lambda p: pytorch_optimizer.ScheduleFreeAdamW(p, lr=0.01))

    def on_train_start(self) -> None:
        self.optimizers().optimizer.train()

    def on_validation_epoch_start(self) -> None:
        self.optimizers().optimizer.eval()

    def on_validation_epoch_end(self) -> None:
        self.optimizers().optimizer.train()


def test_schedule_free(pools: Pools, tmp_path: Path) -> None:
    trainer = {"max_epochs": 2, "enable_checkpointing": True}
    run = Run(ScheduleFree, options={"microbatches": 3}, val_samples=(9,), samples=24, trainer=trainer)
    alone = train(staged(replace(run, callbacks=(saving(tmp_path, save_on_train_epoch_end=True),)), 1))
    results = pools.run(3, fit, replace(run, ckpt_path=str(tmp_path / "step=3.ckpt")))
    assert_equal_weights(joined_weights(results, 3), alone["weights"])
    val_loss = results[0]["callback_metrics"]["val_loss"]
    assert alone["callback_metrics"]["val_loss"] == pytest.approx(val_loss, rel=1e-5)


# These need more than parameters, a learning rate and one gradient: the model, the loss or second derivatives.
OTHERWISE = {
    "a2grad", "adago", "adahessian", "adalomo", "adammini", "adamuon", "alig", "bsam", "demo",
    "distributedmuon", "emofact", "emolynx", "emonavi", "lbfgs", "lomo", "lorarite", "muon", "muonclip",
    "normuon", "ranger21", "sophiah", "spectralsphere",
}  # fmt: skip
# These compute over all parameters, draw random numbers, or amplify rounding (by eigenvectors, signs or divisions).
TO_NO_BITS = {
    "adagc", "adai", "adams", "alice", "asgd", "avagrad", "conda", "dadaptadagrad", "dadaptadam", "dadaptadan",
    "dadaptlion", "dadaptsgd", "dash", "gravity", "kate", "kron", "magma", "prodigy", "scalableshampoo",
    "shampoo", "soap", "splus", "trac",
}  # fmt: skip


class Supported(Net):
    def configure_optimizers(self) -> Any:
        return pytorch_optimizer.load_optimizer(self.run.optimizer)(self.parameters(), lr=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(pytorch_optimizer.get_supported_optimizers()) - OTHERWISE))
def test_every_optimizer_of_a_library(pools: Pools, name: str) -> None:
    """Optimizers that take plain parameters train on two ranks, one on each, as with a plain Trainer."""
    run = Run(Supported, "sync", optimizer=name)
    weights = joined_weights(pools.run(2, fit, run), 2)
    if name in TO_NO_BITS:
        assert all(np.isfinite(value).all() for value in weights.values())
        return
    for key, value in train(replace(run, strategy="plain"))["weights"].items():
        np.testing.assert_allclose(weights[key], value, rtol=0, atol=1e-5, err_msg=key)
