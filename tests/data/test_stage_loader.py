"""Which loader a stage iterates, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_asyncpp.data.errors import DataError
from lightning_asyncpp.data.stage_loader import PlaceholderLoader, stage_loader


class Endless(IterableDataset):
    def __iter__(self):  # type: ignore[no-untyped-def]
        while True:
            yield torch.zeros(1)


def loader(samples: int) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(samples)), batch_size=2)


def test_fewer_samples_than_replicas_are_refused_on_every_stage() -> None:
    for needs_data in (True, False):
        with pytest.raises(DataError, match=r"dataset of 1 samples .* 2 replicas .*data_parallel_size"):
            stage_loader(loader(1), 2, 0, needs_data)


def test_a_sample_per_replica_is_enough() -> None:
    given = loader(2)
    assert stage_loader(given, 2, 0, needs_data=True) is given


def test_middle_stages_count_batches_and_read_nothing() -> None:
    given = stage_loader(loader(5), 1, 0, needs_data=False)
    assert isinstance(given, PlaceholderLoader)
    assert [type(batch).__name__ for batch in given] == ["PlaceholderBatch"] * 3


def test_a_loader_of_unknown_length_is_iterated_everywhere() -> None:
    given = DataLoader(Endless(), batch_size=2)
    assert stage_loader(given, 2, 1, needs_data=False) is given


class Unsized(Dataset):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1,), float(index))


def test_a_dataset_without_a_length_is_the_samplers_business() -> None:
    given = DataLoader(Unsized(), sampler=[0, 1])
    assert stage_loader(given, 2, 0, needs_data=True) is given
