"""Hooks that prepare batches, where a stage in the middle has none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from tests.helpers.oracle import assert_equal_weights, joined_weights
from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, Samples, arrays, delayed, fit, loader, make_trainer, val_loaders


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
    run = Run(module, options={"microbatches": 3}, val_samples=(16,))
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
    run = Run(TwoLoadersNet, options={"microbatches": 3}, batch_size=4)
    (expected,) = pools.run(1, fit, run)
    results = pools.run(3, fit, run)
    assert_equal_weights(joined_weights(results, 3), expected["weights"])
    assert [result["global_step"] for result in results] == [6] * 3


class Estimated:
    """A batch sampler whose length is only an estimate, and whose epochs differ."""

    def __init__(self, estimate: int) -> None:
        self.estimate, self.epoch = estimate, 0

    def __len__(self) -> int:
        return self.estimate

    def __iter__(self) -> Iterator[list[int]]:
        self.epoch += 1
        yield from ([8 * b + i for i in range(8)] for b in range(3 + self.epoch % 2))


def without_an_invalid_one(samples: list[Any]) -> Any:
    """None where the first sample is the ninth of the training set, and later that of a validation set."""
    return None if torch.equal(samples[0]["x"], Samples(40)[8]["x"]) else default_collate(samples)


class EstimatedNet(Net):
    def train_dataloader(self) -> Any:
        estimate = self.run.options["microbatches"] * 2 - 4  # 2: too short, 8: too long
        return DataLoader(Samples(40), batch_sampler=Estimated(estimate), collate_fn=without_an_invalid_one)


class TwoStreamsNet(Net):
    """Two streams of different lengths at once, the shorter one again and again, and a batch of nothing among them."""

    def train_dataloader(self) -> Any:
        streams = [Stream(40, 0), Stream(24, 3)]
        loaders = [DataLoader(stream, batch_size=8, collate_fn=without_an_invalid_one) for stream in streams]
        return CombinedLoader(loaders, "max_size_cycle")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        given = [part for part in batch if part is not None]
        x, y = (torch.cat([part[name] for part in given]) for name in ("x", "y"))
        return torch.nn.functional.mse_loss(self.model(x), y)


class Stream(IterableDataset):
    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    def __iter__(self) -> Iterator[Any]:
        data = Samples(self.count, self.seed)
        return (data[i] for i in range(self.count))


@pytest.mark.parametrize("module", [EstimatedNet, TwoStreamsNet])
@pytest.mark.parametrize("microbatches", [3, pytest.param(6, marks=pytest.mark.slow)])
def test_epochs_end_where_the_first_stage_ends_them(pools: Pools, module: Any, microbatches: int) -> None:
    """Also where the length says something else, there is none, and where batches are skipped."""
    run = Run(module, options={"microbatches": microbatches}, trainer={"max_epochs": 2}, val_samples=(16,))
    (expected,) = pools.run(1, fit, delayed(run, microbatches=microbatches))
    results = pools.run(3, fit, run)
    assert_equal_weights(joined_weights(results, 3), expected["weights"])
    assert [result["global_step"] for result in results] == [expected["global_step"]] * 3


class TellsTheLoader(Net):
    """Changes what the loader has, and reads it."""

    def on_train_epoch_start(self) -> None:
        loader = self.trainer.train_dataloader
        assert loader.batch_size == 8  # type: ignore[union-attr]
        loader.dataset.x = loader.dataset.x * (1 + self.current_epoch)  # type: ignore[union-attr]
        assert len(loader) == 5  # type: ignore[arg-type]


def test_hooks_have_the_loader(pools: Pools) -> None:
    run = Run(TellsTheLoader, options={"microbatches": 3}, trainer={"max_epochs": 2})
    (expected,) = pools.run(1, fit, delayed(run, microbatches=3))
    assert_equal_weights(joined_weights(pools.run(3, fit, run), 3), expected["weights"])
