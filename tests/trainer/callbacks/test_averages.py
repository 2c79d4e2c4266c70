"""Each stage averages the weights of its own layers, and checkpoints have all averages, as with one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_asyncpp import ConfigurationError
from tests.helpers.modules import EMA, HasAverage
from tests.helpers.oracle import assert_equal_weights, joined_parts
from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, arrays, loader, make_trainer, own_state, staged, train, val_loaders


class BeforeEnd(L.Callback):
    """Callback that keeps the trained weights at the end of each epoch, and the loss of each validation."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.trained: dict[str, np.ndarray] = {}

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.trained = {name: array.copy() for name, array in own_state(module).items()}

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.losses.append(float(trainer.callback_metrics["val_loss"]))


def averaged(run: Run, folder: Path) -> dict[str, Any]:
    """Train two epochs with validations and checkpoints; return the last checkpoint's states, losses and weights."""
    L.seed_everything(run.seed, verbose=False)
    module, before = run.module(run), BeforeEnd()
    saving = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    trainer = make_trainer(run, max_epochs=2, callbacks=[saving, before], enable_checkpointing=True)
    trainer.fit(module, loader(run), val_loaders(run), ckpt_path=run.ckpt_path, weights_only=False)
    trainer.save_checkpoint(folder / "end.ckpt")
    content = torch.load(folder / "end.ckpt", weights_only=False)
    names = {"state": "state_dict", "current": "current_model_state", "averaging": "averaging_state"}
    saved = {name: arrays(content.get(entry, {})) for name, entry in names.items()}
    return {**saved, "losses": before.losses, "trained": before.trained}


def assert_same(results: list[dict[str, Any]], single: dict[str, Any]) -> None:
    assert_equal_weights(joined_parts([result["trained"] for result in results]), single["trained"])
    for what in ("state", "current", "averaging"):
        assert_equal_weights(results[0][what], single[what])
    count = len(results[0]["losses"])
    assert results[0]["losses"] == pytest.approx(single["losses"][-count:], rel=1e-6)


def test_equals_one_process(pools: Pools, tmp_path: Path) -> None:
    """Averages, weights and validations equal those of one process, also after a resume with one stage less."""
    run = Run(Net, options={"microbatches": 3}, samples=24, val_samples=(8,), callbacks=EMA)
    single = averaged(staged(run), tmp_path / "one")
    many = pools.run(3, averaged, run, tmp_path / "many")
    assert_same(many, single)
    assert (many[0]["state"]["model.0.weight"] != single["trained"]["model.0.weight"]).any()
    resumed = replace(run, ckpt_path=str(tmp_path / "many" / "epoch=0.ckpt"))
    assert_same(pools.run(2, averaged, resumed, tmp_path / "resumed"), single)


def test_of_a_module_of_its_own_where_stages_step_ahead(pools: Pools, tmp_path: Path) -> None:
    options = {"microbatches": 4, "slack": "exact", "partition": "uniform"}
    run = Run(HasAverage, "default", options, samples=24, val_samples=(8,))
    single = averaged(staged(run), tmp_path / "one")
    assert_same(pools.run(3, averaged, run, tmp_path / "many"), single)


def test_averages_beside_masters_are_refused() -> None:
    run = Run(Net, options={"weight_dtype": "bf16"}, trainer={"precision": "bf16-mixed"}, callbacks=EMA)
    with pytest.raises(ConfigurationError, match="weight_dtype"):
        train(staged(run, 2))
