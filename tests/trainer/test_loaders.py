"""What batches may come from: streams, several loaders, modules that cut and weigh batches themselves."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.helpers.modules import Stream, WeighingNet
from tests.helpers.oracle import assert_equal_weights, joined_weights, loss_after, mini_batches_of, oracle
from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, Samples, fit


class StreamingNet(Net):
    """Nobody knows beforehand which batch is the last, in training and in validation."""

    def train_dataloader(self) -> Any:
        return DataLoader(Stream(self.run.samples), batch_size=self.run.batch_size)

    def val_dataloader(self) -> Any:
        return DataLoader(Stream(13, 1), batch_size=self.run.batch_size)


@pytest.mark.parametrize("stages", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_iterable_dataset(pools: Pools, stages: int) -> None:
    """A middle stage reads it too: only the loader knows when an epoch ends."""
    run = Run(StreamingNet, samples=37, dropout=0.2, trainer={"max_epochs": 2, "logger": "list"})
    results = pools.run(stages, fit, run)
    batches = list(mini_batches_of(run, 2))
    weights, losses = oracle(run, stages, batches)
    assert_equal_weights(joined_weights(results, stages), weights)
    logged = [m["train_loss_step"] for _, m in results[0]["records"] if "train_loss_step" in m]
    assert logged == pytest.approx(losses, rel=1e-6)
    expected = loss_after(run, batches, 13, stages)
    for result in results:
        assert result["steps"] == list(range(1, 11))
        assert result["callback_metrics"]["val_loss"] == pytest.approx(expected, rel=1e-5)


class PairNet(Net):
    """Reads two loaders at once; the second one starts again when it is empty."""

    sizes = (8, 8)

    def train_dataloader(self) -> Any:
        return {name: DataLoader(Samples(n, i), self.sizes[i]) for i, (name, n) in enumerate((("a", 40), ("b", 24)))}

    def microbatch_weight(self, batch: dict[str, dict[str, Tensor]]) -> float:
        return float(len(batch["a"]["x"]))

    def training_step(self, batch: dict[str, dict[str, Tensor]], batch_idx: int) -> Any:
        out = self.model(batch["a"]["x"] + batch["b"]["x"])
        loss = F.mse_loss(out, batch["a"]["y"])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


class UnequalPairNet(PairNet):
    sizes = (8, 4)
    train_dataloader = PairNet.train_dataloader


@pytest.mark.parametrize("stages", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_two_loaders_at_once(pools: Pools, stages: int) -> None:
    run = Run(PairNet, trainer={"max_epochs": 2})
    results = pools.run(stages, fit, run)
    loaders = run.module(run).train_dataloader()
    epoch = [[{"a": a, "b": b}] for a, b in zip(loaders["a"], itertools.cycle(loaders["b"]))]
    assert len(epoch) == 5
    assert_equal_weights(joined_weights(results, stages), oracle(run, stages, epoch * 2)[0])


def test_two_loaders_with_batches_of_different_sizes_are_refused(pools: Pools) -> None:
    for outcome in pools.outcomes(2, fit, Run(UnequalPairNet)):
        assert outcome.error == "ConfigurationError", outcome.trace
        assert "different first dimensions [4, 8]" in outcome.message
        assert "split_batch" in outcome.message


class CuttingNet(WeighingNet):
    """Batches with a tensor that is not batched, cut by the module into pieces of different sizes."""

    def train_dataloader(self) -> Any:
        def with_shift(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
            batch = torch.utils.data.default_collate(samples)
            return batch | {"shift": batch["x"].mean(dim=0)}  # (DIM,)

        return DataLoader(Samples(40), batch_size=8, collate_fn=with_shift)

    def split_batch(self, batch: dict[str, Tensor], parts: int) -> list[Any]:
        x, ends = batch["x"] + batch["shift"], [1, 3, 8][-parts:]
        return [{"x": x[a:b], "y": batch["y"][a:b]} for a, b in zip([0, *ends], ends)]


@pytest.mark.parametrize("stages", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_module_that_cuts_and_weighs(pools: Pools, stages: int) -> None:
    run = Run(CuttingNet, trainer={"logger": "list"})
    results = pools.run(stages, fit, run)
    module = run.module(run)
    pieces = [module.split_batch(batch, stages) for batch in module.train_dataloader()]
    assert len({len(piece["x"]) for piece in pieces[0]}) == stages
    weights, losses = oracle(run, 1, pieces)  # its own cut leaves a piece whole
    assert_equal_weights(joined_weights(results, stages), weights)
    logged = [m["train_loss_step"] for _, m in results[0]["records"] if "train_loss_step" in m]
    assert logged == pytest.approx(losses, rel=1e-6)
