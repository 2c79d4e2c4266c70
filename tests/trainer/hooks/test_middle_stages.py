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


def fit_prepared(run: Run) -> tuple[dict[str, Any], dict[str, float], list[str]]:
    """The weights of all stages, the metrics, and hooks that were not given back."""
    L.seed_everything(run.seed, verbose=False)
    module, trainer, data = Net(run), make_trainer(run), PreparesTwoLoaders(run)
    trainer.fit(module, datamodule=data)
    left = [name for target in (module, data) for name in vars(target) if name.startswith("on_")]
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return arrays(trainer.strategy.full_state_dict()), metrics, left


def test_a_data_modules_hooks_are_called_and_given_back(pools: Pools) -> None:
    run = Run(Net, "default", {"microbatches": 3}, val_samples=(16,), batch_size=4)
    expected, metrics, _ = fit_prepared(staged(run))
    results = pools.run(3, fit_prepared, run)
    assert_equal_weights(results[0][0], expected)
    assert [result[1:] for result in results] == [(metrics, [])] * 3
