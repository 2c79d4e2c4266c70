"""With one replica a training reads its data in the loader's own order, if that is one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, TensorDataset

from lightning_asyncpp import AsyncPipelineStrategy, DelayedGradientStrategy
from tests.helpers.cases import DIM, make_model
from tests.helpers.pool import Pools

COUNT = 12
IN_ORDER = list(range(COUNT))


class Backwards(Sampler):
    """A user's own order."""

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        return iter(reversed(IN_ORDER))


class Batches(BatchSampler):
    """A user's own batches."""


class SeeingNet(L.LightningModule):
    """Knows which samples it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model(0.0)
        self.seen: list[int] = []

    def on_train_batch_start(self, batch: list[Tensor], batch_idx: int) -> None:
        self.seen += batch[0][:, 0].int().tolist()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.model(batch[0] / COUNT).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(kind: str) -> DataLoader:
    data = TensorDataset(torch.arange(float(COUNT))[:, None].expand(-1, DIM))
    options: dict[str, Any] = {
        "in order": {"batch_size": 4},
        "shuffled": {"batch_size": 4, "shuffle": True},
        "own": {"batch_size": 4, "sampler": Backwards()},
        "shuffled batches": {"batch_sampler": Batches(RandomSampler(data), 4, drop_last=False)},
    }[kind]
    return DataLoader(data, **options)


def seen(strategy: str, devices: int, kind: str, **options: Any) -> list[int]:
    made: Any = (AsyncPipelineStrategy if strategy == "async" else DelayedGradientStrategy)(microbatches=2, **options)
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, strategy=made, max_epochs=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    module = SeeingNet()
    trainer.fit(module, loader(kind))
    return module.seen


@pytest.mark.parametrize(("kind", "order"), [("in order", IN_ORDER), ("own", IN_ORDER[::-1])])
def test_an_order_is_kept(pools: Pools, kind: str, order: list[int]) -> None:
    assert pools.run(2, seen, "async", 2, kind) == [order, order]
    assert pools.run(1, seen, "delayed", 1, kind) == [order]


@pytest.mark.parametrize("kind", ["shuffled", "shuffled batches"])
def test_what_is_shuffled_stays_so(pools: Pools, kind: str) -> None:
    first, last = pools.run(2, seen, "async", 2, kind)
    assert first == last != IN_ORDER
    assert sorted(first) == IN_ORDER
    assert pools.run(1, seen, "delayed", 1, kind) == [first]


def test_replicas_are_shuffled_as_under_ddp(pools: Pools) -> None:
    ranks = pools.run(4, seen_by_replicas, "in order")
    both = [sample for rank in (0, 2) for sample in ranks[rank]]
    assert sorted(both) == IN_ORDER
    assert sorted(ranks[0]) != ranks[0]


def seen_by_replicas(kind: str) -> list[int]:
    return seen("async", 4, kind, data_parallel_size=2)
