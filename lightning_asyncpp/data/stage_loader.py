"""Data loaders under a pipeline: middle stages read nothing, and all stages of a replica read the same."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sized
from functools import partial
from typing import Any, TypeGuard

from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader, IterableDataset

from lightning_asyncpp.data.errors import DataError
from lightning_asyncpp.data.replica import is_litdata, reads_streams, use_replica


class PlaceholderBatch:
    """Stands where a middle stage would have a batch."""

    def __repr__(self) -> str:
        return "<no batch: this is a middle stage of the pipeline>"


def has_placeholder(batch: object) -> bool:
    """Whether a batch is a placeholder, or has one from a loader among those of several."""
    if isinstance(batch, (list, tuple, Mapping)):
        return any(map(has_placeholder, batch.values() if isinstance(batch, Mapping) else batch))
    return isinstance(batch, PlaceholderBatch)


class PlaceholderLoader:
    """As many placeholders as a loader has batches; the loader itself is never iterated.

    Its state lives on the ranks that read, where every training loader has one.

    Args:
        loader: the loader of this replica, with a length.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.sampler = getattr(loader, "sampler", None)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[PlaceholderBatch]:
        waits = getattr(self.loader, "waits", False)  # a resumed loader, for the end of the epoch before
        return (PlaceholderBatch() for _ in range(0 if waits else len(self)))

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to take up."""


def stage_loader(loader: object, num_replicas: int, replica: int, needs_data: bool) -> object:
    """Return the loader that a stage iterates instead of ``loader``.

    Args:
        loader: what the user gave; a litdata loader is told the replica, it would otherwise split by rank.
        num_replicas: number of replicas.
        replica: index of this rank's.
        needs_data: whether this is the first or the last stage. The others iterate placeholders if the loader's length
            can be trusted (a ``DataLoader`` over a map-style dataset, a litdata loader), and otherwise the loader
            itself, since only it knows when an epoch ends.

    Raises:
        DataError: fewer samples than replicas; a sampler would quietly give the same one to several.
    """
    _check_size(loader, num_replicas)
    if reads_streams(loader):
        use_replica(loader, num_replicas, replica)
    _seed_workers(loader, replica)
    if needs_data or not (is_litdata(loader) or _is_map_style(loader)):
        return loader
    return PlaceholderLoader(loader)


def _check_size(loader: object, num_replicas: int) -> None:
    # A dataset without a length comes with a sampler of the user's.
    if _is_map_style(loader) and isinstance(loader.dataset, Sized) and len(loader.dataset) < num_replicas:
        raise DataError(
            f"a dataset of {len(loader.dataset)} samples cannot give each of {num_replicas} replicas one of its own;"
            " lower data_parallel_size, or give more data"
        )


def _seed_workers(loader: object, replica: int) -> None:
    # seed_everything(workers=True) makes every rank transform its data in its own way: here every replica does.
    # Fabric has told the loader so before, the Trainer does it later, where nothing is said yet.
    if not isinstance(loader, DataLoader):
        return
    function = loader.worker_init_fn
    is_lightnings = isinstance(function, partial) and function.func is pl_worker_init_function
    if is_lightnings or (function is None and int(os.environ.get("PL_SEED_WORKERS", "0"))):
        loader.worker_init_fn = partial(pl_worker_init_function, rank=replica)


def _is_map_style(loader: object) -> TypeGuard[DataLoader]:
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
