"""Between the first and the last training batch, validation included, ranks exchange no pickles."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.distributed import distributed_c10d

from tests.trainer.pool import Pools
from tests.trainer.runs import Net, Run, fit

OBJECTS = ("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list",
           "send_object_list", "recv_object_list")  # fmt: skip
READERS: tuple[tuple[Any, str], ...] = (
    *((owner, name) for owner in (torch.distributed, distributed_c10d) for name in OBJECTS),
    (distributed_c10d, "_tensor_to_object"), (distributed_c10d, "_unpickler"), (pickle, "loads"), (pickle, "load"),
    (pickle, "Unpickler"), (torch, "load"),
)  # fmt: skip


class Watches(L.Callback):
    """Notes who reads a pickle while batches are trained."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.validations = 0
        self._recording = self._recorded()

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, index: int) -> None:
        if index == 0:
            self._recording.__enter__()

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        self.validations += 1

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index == trainer.num_training_batches - 1:
            self._recording.__exit__(None, None, None)

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        kept = [(owner, name, getattr(owner, name)) for owner, name in READERS]
        for owner, name, reader in kept:
            setattr(owner, name, self._noting(name, reader))
        yield
        for owner, name, reader in kept:
            setattr(owner, name, reader)

    def _noting(self, name: str, reader: Any) -> Any:
        def noting(*args: Any, **kwargs: Any) -> Any:
            self.found.append(f"{name}: {''.join(traceback.format_stack(limit=8))}")
            return reader(*args, **kwargs)

        return noting


class UsesObjects(Watches):
    """What must be found: a user's object that is no plain value."""

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index == 1:
            trainer.strategy.broadcast(Path("x"))
        super().on_train_batch_end(trainer, module, outputs, batch, index)


class BroadcastsPlain(Watches):
    """What Lightning broadcasts, and what a callback may."""

    VALUES: tuple[Any, ...] = (None, True, 3, 0.1, "path/to ü", ("a", [1, {"x": None}]), [], "")

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index == 1:
            for value in self.VALUES:
                sent = value if trainer.global_rank == 1 else f"of rank {trainer.global_rank}"
                received = trainer.strategy.broadcast(sent, src=1)
                assert (type(received), received) == (type(value), value)
        super().on_train_batch_end(trainer, module, outputs, batch, index)


MADE: list[Watches] = []


def watched(kind: type[Watches], options: dict[str, Any]) -> tuple[list[str], int]:
    MADE.clear()

    def make() -> Watches:
        MADE.append(kind())
        return MADE[0]

    fit(Run(Net, "default", options, {"val_check_interval": 2}, callbacks=((make, {}),), val_samples=(8,)))
    return MADE[0].found, MADE[0].validations


@pytest.mark.parametrize("kind", [Watches, BroadcastsPlain])
@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_no_pickle_is_read_while_batches_are_trained(pools: Pools, kind: type[Watches], replicas: int) -> None:
    options = {"data_parallel_size": replicas, "micro_batches": 2 * replicas}
    for found, validations in pools.run(2 * replicas, watched, kind, options):
        assert not found, found[0]
        assert validations == 2


def test_one_would_be_found(pools: Pools) -> None:
    found = [names for names, _ in pools.run(2, watched, UsesObjects, {"micro_batches": 2})]
    assert all(any(name.startswith("broadcast_object_list") for name in names) for names in found)
    assert any(name.startswith("_unpickler") for name in found[1])
