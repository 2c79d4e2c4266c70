"""Telling litdata which share of the data this process reads.

litdata divides a dataset by the world size. In a pipeline all stages of a replica must read the same batches, so the
division has to go by replicas instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from litdata import StreamingDataLoader


def classes_of_litdata(*names: str) -> tuple[type[Any], ...]:
    """Classes of litdata, to ask whether something is one of theirs; none where nobody has imported litdata.

    Its import takes as long as all of this package's: who does not read its datasets is spared it.
    """
    litdata = sys.modules.get("litdata")
    return () if litdata is None else tuple(getattr(litdata, name) for name in names)


@contextmanager
def replica_environment(num_replicas: int, rank: int) -> Iterator[None]:
    """Let litdata detect a world of replicas: it trusts these environment variables before torch.distributed."""
    seen_by_litdata = {"WORLD_SIZE": str(num_replicas), "GLOBAL_RANK": str(rank), "NNODES": "1"}
    before = {name: os.environ.get(name) for name in seen_by_litdata}
    os.environ.update(seen_by_litdata)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def replica_of(trainer: Any) -> tuple[int, int]:
    """Number of replicas, and the index of this process's; a single one without a trainer."""
    sampler = None if trainer is None else trainer.distributed_sampler_kwargs
    return (1, 0) if sampler is None else (sampler["num_replicas"], sampler["rank"])


def use_replica(source: Any, num_replicas: int, rank: int) -> None:
    """Make a litdata loader or dataset read the share of one replica.

    With several replicas the incomplete last batch is dropped, as litdata itself does in a distributed run, so that
    all replicas have the same number of batches.

    Args:
        source: a loader of a ``StreamingDataset`` or of a combination of such datasets, or these themselves.
        num_replicas: number of data-parallel replicas, at least 1.
        rank: index of this process's replica, below ``num_replicas``.
    """
    if isinstance(source, DataLoader):
        use_replica(source.dataset, num_replicas, rank)
        if isinstance(source, classes_of_litdata("StreamingDataLoader")):
            _resume_as_replica(source, num_replicas, rank)
        return
    for dataset in _parts(source):
        dataset.distributed_env = _distributed_env(num_replicas, rank)
        if num_replicas > 1:
            dataset.set_drop_last(True)


def is_litdata(loader: object) -> bool:
    """Whether it is a loader of one streaming dataset."""
    return isinstance(loader, DataLoader) and isinstance(loader.dataset, classes_of_litdata("StreamingDataset"))


def reads_streams(loader: object) -> bool:
    """Whether it is a loader of a streaming dataset, or of several, of which one may not know how long they are."""
    combinations = classes_of_litdata("CombinedStreamingDataset", "ParallelStreamingDataset")
    return is_litdata(loader) or (isinstance(loader, DataLoader) and isinstance(loader.dataset, combinations))


def leave_where_it_was(loader: object) -> None:
    """Have the next iteration of a litdata loader that was resumed be another epoch, though this one was not finished.

    It forgets where it was resumed only when an epoch is read to its end.
    """
    if isinstance(loader, classes_of_litdata("StreamingDataLoader")):
        loader.restore = False


def set_epoch_before(loader: StreamingDataLoader, state: Mapping[str, Any], again: bool = False) -> None:
    """Have the next iteration of a litdata loader be the epoch after the one that it was in when it said its state.

    Args:
        loader: before it is iterated.
        state: of such a loader.
        again: have it be that epoch, from its beginning.
    """
    loader.current_epoch = state["current_epoch"] - again


def with_own_place(loader: Any, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state of a litdata loader with this one's folders and URLs, which litdata compares, in place of the writer's.

    That it reads the same data is for the caller to know.
    """
    if not isinstance(loader, classes_of_litdata("StreamingDataLoader")) or not state.get("dataset"):
        return state
    saved = state["dataset"]
    if isinstance(loader.dataset, classes_of_litdata("StreamingDataset")):
        return {**state, "dataset": _with_place_of(loader.dataset, saved)}
    parts = {name: _with_place_of(part, saved[name]) for name, part in _numbered_parts(loader.dataset) if name in saved}
    return {**state, "dataset": {**saved, **parts}}


def _numbered_parts(combination: Any) -> list[tuple[str, Any]]:
    return [(str(number), part) for number, part in enumerate(getattr(combination, "_datasets", []))]


def _with_place_of(dataset: Any, saved: Any) -> Any:
    if not isinstance(saved, dict) or "input_dir_path" not in saved:
        return saved
    own = dataset.input_dir
    # A remote dataset is cached in a folder of each process; the checkpoint names the one of its writer.
    path = own.path if own.url is None else None
    place = {"input_dir_path": path, "input_dir_url": own.url, "cache_dir_path": dataset.cache_dir.path}
    # Without shuffling the seed decides nothing, and litdata compares it, too.
    return {**saved, **place, **({} if dataset.shuffle else {"seed": dataset.seed})}


def _parts(source: Any) -> list[Any]:
    return [source] if isinstance(source, classes_of_litdata("StreamingDataset")) else list(source._datasets)


def _distributed_env(num_replicas: int, rank: int) -> Any:
    """Build litdata's private description of the world; the only place where the private name is used."""
    from litdata.utilities.env import _DistributedEnv

    # One node whatever the cluster: with more, litdata's order would depend on how the replicas are placed.
    return _DistributedEnv(world_size=num_replicas, global_rank=rank, num_nodes=1)


def _resume_as_replica(loader: Any, num_replicas: int, rank: int) -> None:
    """On resuming, let the loader compare a checkpoint with the world of replicas, and keep its own cache folder."""
    load_state_dict = type(loader).load_state_dict

    def load_for_replica(state: dict[str, Any]) -> None:
        dataset: Any = loader.dataset
        if isinstance(dataset, classes_of_litdata("StreamingDataset")) and dataset.input_dir.url is not None:
            # A remote dataset is cached in a folder of each process; the checkpoint names the one of its writer.
            own_folders = {"input_dir_path": None, "cache_dir_path": dataset.cache_dir.path}
            state = {**state, "dataset": {**state["dataset"], **own_folders}}
        with replica_environment(num_replicas, rank):
            load_state_dict(loader, state)

    loader.load_state_dict = load_for_replica
