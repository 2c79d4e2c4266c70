"""Workers of a loader are seeded by the replica, and devices decide the backend."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader, TensorDataset

from lightning_asyncpp.core.ranks.process_groups import backend_of
from lightning_asyncpp.strategy_parts.stage_loader import stage_loader


def loader(samples: int) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(samples)), batch_size=2)


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


def test_a_shared_gpu_needs_gloo() -> None:
    cpu, first, second = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")
    assert backend_of([first, second, first], None) == "gloo"
    for devices in (None, [cpu, cpu], [first, second]):
        assert backend_of(devices, None) is None
