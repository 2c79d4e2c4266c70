"""Hooks that prepare batches, where a stage in the middle has none: besides those in the table of idioms."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch

from tests.helpers.oracle import assert_equal_weights
from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, arrays, loader, make_trainer, staged, val_loaders


class PreparesTwoLoaders(L.LightningDataModule):
    """Trains on batches of two loaders at once, and takes them to pieces where they are prepared."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def train_dataloader(self) -> Any:
        return {"a": loader(self.run, 24), "b": loader(self.run, 16, seed=1)}

    def val_dataloader(self) -> Any:
        return val_loaders(self.run)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "a": {**batch["a"], "x": batch["a"]["x"] * 2}} if "a" in batch else batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {name: torch.cat([batch["a"][name], batch["b"][name]]) for name in ("x", "y")} if "a" in batch else batch


def fit_prepared(run: Run) -> dict[str, Any]:
    """The weights of all stages."""
    L.seed_everything(run.seed, verbose=False)
    trainer, data = make_trainer(run), PreparesTwoLoaders(run)
    trainer.fit(Net(run), datamodule=data)
    assert not [name for name in vars(data) if name.startswith("on_")], "hooks were not given back"
    return arrays(trainer.strategy.full_state_dict())


def test_a_data_modules_hooks_are_called_and_given_back(pools: Pools) -> None:
    run = Run(Net, "default", {"microbatches": 3}, val_samples=(16,), batch_size=4)
    assert_equal_weights(pools.run(3, fit_prepared, run)[0], fit_prepared(staged(run)))
