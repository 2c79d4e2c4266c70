"""What batches may come from and hold: every sample keeps what belongs to it, in the loader's own order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, default_collate

from lightning_asyncpp import ConfigurationError
from lightning_asyncpp.core.tree import map_tensors
from tests.helpers.modules import WeighingNet
from tests.helpers.oracle import assert_equal_weights, oracle
from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, Samples, loader, make_trainer, staged, train

# Batches of 8 and 5 samples; microbatches of 3, 3, 2 and of 2, 2, 1.
SAMPLES = 13
IN_ORDER = list(range(SAMPLES))


class NamedSamples(Samples):
    """Samples with their number as a tensor, as a string, and as two strings in a list."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = {"index": torch.tensor(index), "name": f"n{index}", "tags": [f"a{index}", f"b{index}"]}
        return super().__getitem__(index) | number


class NamedNet(Net):
    """Keeps which names every step saw beside which samples; predicts tensors, strings and numbers."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.seen: list[int] = []
        self.sizes: list[int] = []

    def remember(self, batch: dict[str, Any]) -> None:
        numbers = batch["index"].tolist()
        first, second = batch["tags"]
        names = [(f"n{number}", f"a{number}", f"b{number}") for number in numbers]
        assert list(zip(batch["name"], first, second, strict=True)) == names
        self.seen += numbers
        self.sizes.append(len(numbers))

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self.remember(batch)
        return super().training_step(batch, batch_idx)

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        self.remember(batch)
        y, index, name = self.model(batch["x"]), batch["index"], batch["name"]
        return {"y": y, "name": name, "pair": (index, name), "mean": y.mean().item(), "mean_tensor": y.mean()}


class Backwards(Sampler):
    """A user's own order."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(IN_ORDER[::-1])


class Batches(BatchSampler):
    """A user's own batches."""


def work(run: Run, what: str, **order: Any) -> tuple[list[int], Any]:
    """``trainer.fit`` or ``trainer.predict`` with Lightning's own samplers: what steps saw, and what came back."""
    L.seed_everything(run.seed, verbose=False)
    module, data = run.module(run), NamedSamples(run.samples)
    if order.pop("batches", False):
        order["batch_sampler"] = Batches(RandomSampler(data), 8, drop_last=False)
    loader = DataLoader(data, **{"batch_size": 1 if "batch_sampler" in order else 8, **order})
    returned = getattr(make_trainer(run, use_distributed_sampler=True), what)(module, loader)
    assert run != RUN or module.sizes == [3, 3, 2, 2, 2, 1]
    return module.seen, map_tensors(lambda tensor: tensor.numpy(), returned)  # type: ignore[union-attr]


RUN = Run(NamedNet, options={"microbatches": 3}, samples=SAMPLES)


def test_every_sample_keeps_its_strings(pools: Pools) -> None:
    """On the first stage and on the last, in every microbatch, those of the odd last batch included."""
    (last, returned), (first, nothing) = pools.run(2, work, RUN, "predict")
    assert last == first == IN_ORDER
    assert all(batch is None for batch in nothing or [])
    _, single = work(replace(RUN, strategy="plain"), "predict")
    for mine, alone in zip(returned, single, strict=True):
        assert list(mine) == list(alone)
        assert mine["name"] == alone["name"] == mine["pair"][1]
        assert mine["pair"][0].tolist() == alone["pair"][0].tolist()
        assert isinstance(mine["mean"], float)
        np.testing.assert_allclose(mine["y"], alone["y"], rtol=1e-5)
        for mean in ("mean", "mean_tensor"):
            assert float(mine[mean]) == pytest.approx(float(alone[mean]), rel=1e-4)


@pytest.mark.parametrize(
    "order",
    [{}, {"sampler": Backwards()}, {"shuffle": True}, {"batches": True}],
    ids=["in order", "own", "shuffled", "shuffled batches"],
)
def test_an_order_is_kept(pools: Pools, order: dict[str, Any]) -> None:
    """With one replica, by two ranks and by one process."""
    (last, _), (first, _) = pools.run(2, fit_in_order, RUN, order)
    alone, _ = work(staged(RUN, 1), "fit", **order)
    assert first == last == alone
    assert sorted(first) == IN_ORDER
    if not {"shuffle", "batches"} & order.keys():
        assert first == (IN_ORDER[::-1] if order else IN_ORDER)
    else:
        assert first != IN_ORDER


def fit_in_order(run: Run, order: dict[str, Any]) -> tuple[list[int], Any]:
    return work(run, "fit", **order)


def test_replicas_are_shuffled_as_under_ddp(pools: Pools) -> None:
    run = replace(RUN, options={"microbatches": 2, "data_parallel_size": 2}, samples=12)
    ranks = [seen for seen, _ in pools.run(4, work, run, "fit")]
    assert sorted(ranks[0] + ranks[2]) == IN_ORDER[:12]
    assert sorted(ranks[0]) != ranks[0]


class UnequalPairNet(Net):
    """Reads two loaders at once, whose batches are of different sizes."""

    def train_dataloader(self) -> Any:
        return {"a": loader(self.run), "b": DataLoader(Samples(24), batch_size=4)}


def test_two_loaders_with_batches_of_different_sizes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"different first dimensions \[4, 8\].*split_batch"):
        train(staged(Run(UnequalPairNet)))


class CuttingNet(WeighingNet):
    """Batches with a tensor that is not batched, cut by the module into pieces of different sizes."""

    def train_dataloader(self) -> Any:
        def with_shift(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
            batch = default_collate(samples)
            return batch | {"shift": batch["x"].mean(dim=0)}  # (DIM,)

        return DataLoader(Samples(40), batch_size=8, collate_fn=with_shift)

    def split_batch(self, batch: dict[str, Tensor], parts: int) -> list[Any]:
        x, ends = batch["x"] + batch["shift"], [1, 3, 8][-parts:]
        return [{"x": x[a:b], "y": batch["y"][a:b]} for a, b in zip([0, *ends], ends)]


def test_a_module_that_cuts_and_weighs() -> None:
    run = Run(CuttingNet)
    module = CuttingNet(run)
    pieces = [module.split_batch(batch, 3) for batch in module.train_dataloader()]
    result = train(staged(run))
    weights, losses = oracle(run, 1, pieces)  # its own cut leaves a piece whole
    assert_equal_weights(result["weights"], weights)
    assert result["losses"] == pytest.approx(losses, rel=1e-6)
