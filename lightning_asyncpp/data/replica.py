"""Telling litdata which share of the data this process reads.

litdata divides a dataset by the world size. In a pipeline all stages of a replica must read the same batches, so the
division has to go by replicas instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader


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


def _parts(source: Any) -> list[Any]:
    return [source] if isinstance(source, classes_of_litdata("StreamingDataset")) else list(source._datasets)


def _distributed_env(num_replicas: int, rank: int) -> Any:
    """Build litdata's private description of the world; the only place where the private name is used."""
    from litdata.utilities.env import _DistributedEnv

    # One node whatever the cluster: with more, litdata's order would depend on how the replicas are placed.
    return _DistributedEnv(world_size=num_replicas, global_rank=rank, num_nodes=1)


def _resume_as_replica(loader: Any, num_replicas: int, rank: int) -> None:
    """Let a loader that resumes compare a checkpoint with the world of replicas, and not with the writer's folders."""
    load_state_dict = type(loader).load_state_dict

    def load_for_replica(state: dict[str, Any]) -> None:
        with replica_environment(num_replicas, rank):
            load_state_dict(loader, {**state, "dataset": _with_own_place(loader.dataset, state.get("dataset") or {})})

    loader.load_state_dict = load_for_replica


def _with_own_place(dataset: Any, saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state of a dataset, or of each of several, with this one's folders and URLs, which litdata compares.

    That it reads the same data is for the caller to know.
    """
    if not isinstance(dataset, classes_of_litdata("StreamingDataset")):
        parts = ((str(number), part) for number, part in enumerate(_parts(dataset)))
        return {**saved, **{name: _with_own_place(part, saved[name]) for name, part in parts if name in saved}}
    if "input_dir_path" not in saved:
        return saved
    own = dataset.input_dir
    # A remote dataset is cached in a folder of each process; the checkpoint names the one of its writer.
    path = own.path if own.url is None else None
    place = {"input_dir_path": path, "input_dir_url": own.url, "cache_dir_path": dataset.cache_dir.path}
    # Without shuffling the seed decides nothing, and litdata compares it, too.
    return {**saved, **place, **({} if dataset.shuffle else {"seed": dataset.seed})}
