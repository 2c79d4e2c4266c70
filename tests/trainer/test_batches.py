"""Batches and results that hold more than tensors, through the Trainer: every sample keeps what belongs to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_asyncpp.core.tree import map_tensors
from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, Samples, make_trainer

# Batches of 8 and 5 samples; microbatches of 3, 3, 2 and of 2, 2, 1.
SAMPLES = 13
RUN_OPTIONS = {"microbatches": 3}


class NamedSamples(Dataset):
    """Samples with their number as a tensor, as a string, and as two strings in a list."""

    def __init__(self, count: int) -> None:
        self.samples = Samples(count)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = {"index": torch.tensor(index), "name": f"n{index}", "tags": [f"a{index}", f"b{index}"]}
        return self.samples[index] | number


class NamedNet(Net):
    """Keeps which names every step saw beside which samples."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.seen: list[list[tuple[int, str, str, str]]] = []

    def remember(self, batch: dict[str, Any]) -> None:
        first, second = batch["tags"]
        self.seen.append(list(zip(batch["index"].tolist(), batch["name"], first, second, strict=True)))

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self.remember(batch)
        return super().training_step(batch, batch_idx)

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        self.remember(batch)
        return self.result_of(batch, self.model(batch["x"]))

    def result_of(self, batch: dict[str, Any], y: Tensor) -> Any:
        return y


class StringsNet(NamedNet):
    """Returns a string per sample."""

    def result_of(self, batch: dict[str, Any], y: Tensor) -> list[str]:
        return [f"{name} of {index}" for index, name in zip(batch["index"].tolist(), batch["name"])]


class ManyKindsNet(NamedNet):
    """Returns tensors, strings and numbers."""

    def result_of(self, batch: dict[str, Any], y: Tensor) -> dict[str, Any]:
        index, name = batch["index"], batch["name"]
        return {"y": y, "name": name, "pair": (index, name), "mean": y.mean().item(), "mean_tensor": y.mean()}


def work(run: Run, what: str) -> dict[str, Any]:
    """``trainer.fit`` or ``trainer.predict``: what the steps saw, and what came back."""
    L.seed_everything(run.seed, verbose=False)
    module = run.module(run)
    data = DataLoader(NamedSamples(run.samples), batch_size=run.batch_size)
    returned = getattr(make_trainer(run), what)(module, data)
    assert isinstance(module, NamedNet)
    return {"seen": module.seen, "returned": map_tensors(lambda tensor: tensor.numpy(), returned)}


def predictions(pools: Pools, module: type[NamedNet]) -> tuple[list[Any], list[Any]]:
    """What two stages return, on the last one, and a single process without the strategy."""
    run = Run(module, samples=SAMPLES, options=RUN_OPTIONS)
    last, first = pools.run(2, work, run, "predict")
    assert all(batch is None for batch in first["returned"] or [])
    (single,) = pools.run(1, work, replace(run, strategy="plain"), "predict")
    assert len(last["returned"]) == len(single["returned"]) == 2
    return last["returned"], single["returned"]


@pytest.mark.parametrize("strategy", ["async", "sync"])
@pytest.mark.parametrize("what", ["fit", "predict"])
def test_every_sample_keeps_its_strings(pools: Pools, strategy: str, what: str) -> None:
    """On the first stage and on the last, in every microbatch, those of the odd last batch included."""
    run = Run(NamedNet, strategy, RUN_OPTIONS, {"use_distributed_sampler": False}, samples=SAMPLES)
    for result in pools.run(2, work, run, what):
        assert [len(step) for step in result["seen"]] == [3, 3, 2, 2, 2, 1]
        samples = [sample for step in result["seen"] for sample in step]
        assert samples == [(i, f"n{i}", f"a{i}", f"b{i}") for i in range(SAMPLES)]


def test_predicting_a_list_of_strings(pools: Pools) -> None:
    mine, single = predictions(pools, StringsNet)
    assert mine == single
    assert mine[1] == [f"n{i} of {i}" for i in range(8, SAMPLES)]


def test_predicting_many_kinds_at_once(pools: Pools) -> None:
    for mine, single in zip(*predictions(pools, ManyKindsNet)):
        assert list(mine) == list(single)
        assert mine["name"] == single["name"]
        assert mine["pair"][0].tolist() == single["pair"][0].tolist()
        assert mine["pair"][1] == single["pair"][1]
        np.testing.assert_allclose(mine["y"], single["y"], rtol=1e-5)
        assert mine["mean"] == pytest.approx(single["mean"], rel=1e-4)
        assert isinstance(mine["mean"], float)
        assert float(mine["mean_tensor"]) == pytest.approx(float(single["mean_tensor"]), rel=1e-4)
