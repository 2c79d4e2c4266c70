"""Each stage iterates the loader that it needs, and devices decide the backend."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_asyncpp.core.ranks.process_groups import backend_of
from lightning_asyncpp.strategy_parts.stage_loader import AnnouncingLoader, Next, PlaceholderLoader, stage_loader


class Endless(IterableDataset):
    def __iter__(self):  # type: ignore[no-untyped-def]
        while True:
            yield torch.zeros(1)


def loader(samples: int) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(samples)), batch_size=2)


def test_middle_stages_count_batches_and_read_nothing() -> None:
    given = stage_loader(loader(5), 1, 0, needs_data=False)
    assert isinstance(given, PlaceholderLoader)
    assert [type(batch).__name__ for batch in given] == ["PlaceholderBatch"] * 3


def test_a_loader_of_unknown_length_is_iterated_everywhere() -> None:
    given = DataLoader(Endless(), batch_size=2)
    assert stage_loader(given, 2, 1, needs_data=False) is given


def workers_rank(given: DataLoader, replica: int) -> int | None:
    prepared = stage_loader(given, 2, replica, needs_data=True)
    assert isinstance(prepared, DataLoader)
    function = prepared.worker_init_fn
    return function.keywords["rank"] if isinstance(function, partial) else None


@pytest.mark.parametrize("told", [False, True], ids=["trainer", "fabric-told-the-loader-its-rank"])
def test_workers_are_seeded_by_the_replica(monkeypatch: pytest.MonkeyPatch, told: bool) -> None:
    """Workers are seeded only with ``PL_SEED_WORKERS=1``, and only if the user gave no ``worker_init_fn``."""
    given, own = loader(4), loader(4)
    if told:
        given.worker_init_fn = partial(pl_worker_init_function, rank=7)
    own.worker_init_fn = print
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    assert workers_rank(given, replica=1) == 1
    assert workers_rank(own, replica=1) is None
    monkeypatch.setenv("PL_SEED_WORKERS", "0")
    assert workers_rank(loader(4), replica=1) is None


def test_what_a_first_stage_loads_is_followed() -> None:
    told: list[Next] = []
    given = DataLoader([1, 2, 3], batch_size=1, collate_fn=lambda samples: None if samples == [2] else samples)
    first = AnnouncingLoader(given, told.append)
    assert list(first) == [[1], None, [3]]
    assert told == [Next.BATCH, Next.NOTHING, Next.BATCH, Next.END]
    middle = stage_loader(given, 1, 0, needs_data=False, follow=lambda: told.pop(0))
    assert [None if batch is None else type(batch).__name__ for batch in middle] == [  # type: ignore[attr-defined]
        "PlaceholderBatch", None, "PlaceholderBatch",
    ]  # fmt: skip


def test_a_shared_gpu_needs_gloo() -> None:
    cpu, first, second = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")
    assert backend_of([first, second, first], None) == "gloo"
    for devices in (None, [cpu, cpu], [first, second]):
        assert backend_of(devices, None) is None
