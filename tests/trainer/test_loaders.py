"""Samples keep their strings, loaders keep their order, and modules may split and weigh batches themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, default_collate

from lightning_asyncpp.core.tree import map_tensors
from tests.helpers.modules import WeighingNet
from tests.helpers.oracle import assert_equal_weights, oracle
from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, Samples, make_trainer, staged, train

# The batches have 8 and 5 samples, and their microbatches 3, 3, 2 and 2, 2, 1.
SAMPLES = 13
IN_ORDER = list(range(SAMPLES))


class NamedSamples(Samples):
    """Dataset whose samples also contain their number as a tensor, in a string, and in a list of two strings."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = {"index": torch.tensor(index), "name": f"n{index}", "tags": [f"a{index}", f"b{index}"]}
        return super().__getitem__(index) | number


class NamedNet(Net):
    """Module that records the samples of every step and checks their strings; it predicts tensors and strings."""

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
        return {"y": self.model(batch["x"]), "pair": (batch["index"], batch["name"])}


def work(run: Run, what: str, order: dict[str, Any]) -> tuple[list[int], Any]:
    """Run ``trainer.fit`` or ``predict`` with Lightning's samplers; return the samples seen in steps and the result."""
    L.seed_everything(run.seed, verbose=False)
    module, data = run.module(run), NamedSamples(run.samples)
    returned = getattr(make_trainer(run, use_distributed_sampler=True), what)(module, DataLoader(data, **order))
    assert run != RUN or module.sizes == [3, 3, 2, 2, 2, 1]
    return module.seen, map_tensors(lambda tensor: tensor.numpy(), returned)  # type: ignore[union-attr]


RUN = Run(NamedNet, options={"microbatches": 3}, samples=SAMPLES)
IN_EIGHTS: dict[str, Any] = {"batch_size": 8}


def test_every_sample_keeps_its_strings(pools: Pools) -> None:
    """Samples keep their strings on the first and last stage in every microbatch, also in the smaller last batch."""
    (last, returned), (first, nothing) = pools.run(2, work, RUN, "predict", IN_EIGHTS)
    assert last == first == IN_ORDER
    assert all(batch is None for batch in nothing or [])
    _, single = work(replace(RUN, strategy="plain"), "predict", IN_EIGHTS)
    for mine, alone in zip(returned, single, strict=True):
        np.testing.assert_allclose(mine["y"], alone["y"], rtol=1e-5)
        assert mine["pair"][0].tolist() == alone["pair"][0].tolist()
        assert mine["pair"][1] == alone["pair"][1]


class Batches(BatchSampler):
    """Batch sampler class of a user."""


BATCHES = Batches(RandomSampler(range(SAMPLES)), 8, drop_last=False)


@pytest.mark.parametrize(
    "order",
    [IN_EIGHTS | {"sampler": IN_ORDER[::-1]}, IN_EIGHTS | {"shuffle": True}, {"batch_sampler": BATCHES}],
    ids=["own", "shuffled", "shuffled batches"],
)
def test_an_order_is_kept(pools: Pools, order: dict[str, Any]) -> None:
    """With one replica, two ranks and one process see samples in the same order, which is that of the sampler."""
    (last, _), (first, _) = pools.run(2, work, RUN, "fit", order)
    assert first == last == work(staged(RUN, 1), "fit", order)[0]
    assert sorted(first) == IN_ORDER
    assert first == IN_ORDER[::-1] if "sampler" in order else first not in (IN_ORDER, IN_ORDER[::-1])


class CuttingNet(WeighingNet):
    """Module that splits its batches, which have an unbatched tensor, into pieces of different sizes."""

    def train_dataloader(self) -> Any:
        def with_shift(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
            batch = default_collate(samples)
            return batch | {"shift": batch["x"].mean(dim=0)}  # (DIM,)

        return DataLoader(Samples(40), batch_size=8, collate_fn=with_shift)

    def split_batch(self, batch: dict[str, Tensor], parts: int) -> list[Any]:
        x, ends = batch["x"] + batch["shift"], [1, 3, 8][-parts:]
        return [{"x": x[a:b].clone(), "y": batch["y"][a:b].clone()} for a, b in zip([0, *ends], ends)]


def test_a_module_that_cuts_and_weighs() -> None:
    run = Run(CuttingNet)
    module = CuttingNet(run)
    pieces = [module.split_batch(batch, 3) for batch in module.train_dataloader()]
    weights, _ = oracle(run, 1, pieces)  # with 1 microbatch, the oracle leaves a piece whole
    assert_equal_weights(train(staged(run))["weights"], weights)
