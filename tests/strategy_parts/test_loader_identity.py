"""What decides a loader's batches: differences side by side, and none where none is known."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_asyncpp.strategy_parts.loader_identity import differences, differing, keeps_place, loader_identity
from lightning_asyncpp.strategy_parts.resumable_loader import ResumableLoader
from lightning_asyncpp.strategy_parts.stage_loader import PlaceholderLoader


def data(count: int = 40, change: float = 0) -> TensorDataset:
    return TensorDataset(torch.arange(float(count)) + change)


def loader(
    count: int = 40, change: float = 0, rank: int = 0, seed: int = 0, shuffle: bool = True, **options: Any
) -> Any:
    held = data(count, change)
    sampler = DistributedSampler(held, 2, rank, shuffle, seed)
    return StatefulDataLoader(held, **{"batch_size": 4, "sampler": sampler, **options})


def test_the_same_on_all_replicas_and_in_all_wrappers() -> None:
    told = loader_identity(loader())
    assert told == loader_identity(loader(rank=1)) == loader_identity(loader(num_workers=2))
    assert told == loader_identity(ResumableLoader(PlaceholderLoader(loader()), lambda: 0))
    assert json.loads(json.dumps(told)) == told
    assert {name: told[name] for name in ("batch_size", "drop_last", "rows", "sampler", "shuffle", "seed")} == {
        "batch_size": 4, "drop_last": False, "rows": 40, "sampler": "DistributedSampler", "shuffle": True, "seed": 0
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"batch_size": 14}, ["batch_size=14, and the checkpoint was written with 4"]),
        ({"seed": 2}, ["seed=2, and the checkpoint was written with 0"]),
        ({"shuffle": False}, ["shuffle=False, and the checkpoint was written with True"]),
        ({"drop_last": True}, ["drop_last=True, and the checkpoint was written with False"]),
        ({"change": 1}, ["other training data (contents="]),
        ({"count": 39}, ["rows=39, and the checkpoint was written with 40", "other training data (contents="]),
        ({"sampler": SequentialSampler(data())}, ["sampler=SequentialSampler, and the checkpoint was"]),
        ({"seed": 2, "batch_size": 5}, ["batch_size=5, and the che", "seed=2, and the che"]),
    ],
)  # fmt: skip
def test_all_differences_side_by_side(changed: dict[str, Any], told: list[str]) -> None:
    found = differences(loader_identity(loader(**changed)), loader_identity(loader()))
    assert len(found) == len(told)
    assert all(text.startswith(begin) for text, begin in zip(found, told, strict=True))


def test_what_orders_nothing() -> None:
    first, second = (loader_identity(loader(shuffle=False, seed=seed)) for seed in (1, 2))
    assert not differing(first, second)
    plain = loader_identity(DataLoader(data(), 4, sampler=RandomSampler(data(), generator=torch.Generator())))
    inside = BatchSampler(RandomSampler(data()), 4, False)
    assert not differing(loader_identity(DataLoader(data(), batch_sampler=inside)), plain)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (WeightedRandomSampler([1.0] * 40, 40), WeightedRandomSampler([1.0] * 39 + [2.0], 40)),
        (SubsetRandomSampler(range(20)), SubsetRandomSampler(range(10, 30))),
        (RandomSampler(data()), RandomSampler(data(), replacement=True)),
    ],
)
def test_samplers_of_torch(one: Any, other: Any) -> None:
    before, same, after = (loader_identity(DataLoader(data(), 4, sampler=sampler)) for sampler in (one, one, other))
    assert before == same
    assert differing(after, before)


class Batches(BatchSampler):
    """Of a user's."""


def test_a_sampler_of_batches_of_a_users() -> None:
    told = loader_identity(DataLoader(data(), batch_sampler=Batches(SequentialSampler(data()), 5, True)))
    assert (told["batch_sampler"], told["batch_size"], told["drop_last"]) == ("Batches", 5, True)


class Elsewhere(Dataset):
    """Its files are on another machine."""

    def __init__(self) -> None:
        self.path = "/another/machine/rows.bin"

    def __len__(self) -> int:
        raise FileNotFoundError(self.path)

    def __getitem__(self, index: int) -> Any:
        raise FileNotFoundError(self.path)


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        yield from range(10)


class Strange:
    """Neither torch's nor anybody's."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


@pytest.mark.parametrize("make", [Strange, object, list, lambda: None, lambda: iter(()), lambda: DataLoader(Endless())])
def test_unknown_is_not_compared(make: Any) -> None:
    told = loader_identity(make())
    json.dumps(told)
    assert not differing(told, loader_identity(loader(batch_size=1)))
    assert not differing(loader_identity(loader(batch_size=1)), told)


def test_data_on_another_machine() -> None:
    told = loader_identity(PlaceholderLoader(DataLoader(Elsewhere(), 4, sampler=SequentialSampler(data()))))
    assert (told["batch_size"], told["rows"], told["files"], told["contents"]) == (4, None, None, None)


def test_an_older_checkpoint_says_nothing() -> None:
    assert not differing(loader_identity(loader()), None)
    assert not differences(loader_identity(loader()), {})


def test_where_a_place_means_something() -> None:
    assert keeps_place(loader(), ["batch_size", "contents"])
    assert not keeps_place(loader(), ["rows", "contents"])


def test_the_own_sampler_in_lightnings() -> None:
    wrapped = DistributedSamplerWrapper(RandomSampler(data()), num_replicas=1, rank=0)
    assert loader_identity(DataLoader(data(), 4, sampler=wrapped))["sampler"] == "DistributedSamplerWrapper"


def test_a_loader_that_has_an_identity_of_its_own() -> None:
    given = loader()
    given.identity = "the user's"
    resumable = ResumableLoader(given, lambda: 0)
    assert resumable.identity == loader_identity(given)
    assert given.identity == "the user's"
