"""Hooks that prepare batches, where a stage in the middle has none."""

from __future__ import annotations

from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.trainer.pool import Pools
from tests.trainer.reference import assert_equal_weights, joined_weights
from tests.trainer.runs import Net, Run, arrays, fit, loader, make_trainer, val_loaders


class Prepares:
    """Scales a batch in the three hooks around its transfer, each of which takes it to pieces."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "x": batch["x"] * 2}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "x": batch["x"] + 1}


class PreparingNet(Prepares, Net):
    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return {name: value.to(device) for name, value in batch.items()}


class PreparingData(Prepares, L.LightningDataModule):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def train_dataloader(self) -> Any:
        return loader(self.run)

    def val_dataloader(self) -> Any:
        return val_loaders(self.run)


def train(run: Run, in_data_module: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    L.seed_everything(run.seed, verbose=False)
    module, trainer = run.module(run), make_trainer(run)
    data = PreparingData(run)
    if in_data_module:
        trainer.fit(module, datamodule=data)
    else:
        trainer.fit(module, data.train_dataloader(), data.val_dataloader())
    hooks = [name for target in (module, data) for name in vars(target) if name.startswith("on_")]
    return arrays(trainer.strategy.full_state_dict()), {"left": hooks}


@pytest.mark.parametrize(("module", "in_data_module"), [(PreparingNet, False), (Net, True)])
def test_batches_are_prepared_as_with_one_stage(pools: Pools, module: Any, in_data_module: bool) -> None:
    run = Run(module, options={"micro_batches": 3}, val_samples=(16,))
    ((expected, _),) = pools.run(1, train, run, in_data_module)
    ranks = pools.run(3, train, run, in_data_module)
    for name, array in expected.items():
        np.testing.assert_array_equal(ranks[0][0][name], array)
    assert all(left == {"left": []} for _, left in ranks), "hooks were not given back"


class TwoLoadersNet(Net):
    """Trains on batches of two loaders at once, and takes them to pieces where they are prepared."""

    def train_dataloader(self) -> Any:
        return {"a": loader(self.run, 24), "b": loader(self.run, 16, seed=1)}

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "a": {**batch["a"], "x": batch["a"]["x"] * 2}} if self.trainer.training else batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {name: torch.cat([batch["a"][name], batch["b"][name]]) for name in ("x", "y")}


def test_batches_of_several_loaders(pools: Pools) -> None:
    run = Run(TwoLoadersNet, options={"micro_batches": 3}, batch_size=4)
    (expected,) = pools.run(1, fit, run)
    results = pools.run(3, fit, run)
    assert_equal_weights(joined_weights(results, 3), expected["weights"])
    assert [result["global_step"] for result in results] == [6] * 3
