"""Reading a replica's share of a litdata dataset.

litdata divides a dataset by the world size. In a pipeline all stages of a replica must read the same batches, so the
dataset is divided by replicas instead.
"""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from lightning_asyncpp.errors import DataError

if TYPE_CHECKING:
    from litdata import StreamingDataLoader


_OTHER_NAMES = {"context_length": "max_position_embeddings"}  # names in transformers


def classes_of_litdata(*names: str) -> tuple[type[Any], ...]:
    """Return classes of litdata for ``isinstance``; none if litdata was not imported.

    Importing litdata takes as long as importing this package, so only code that reads its datasets imports it.
    """
    litdata = sys.modules.get("litdata")
    return () if litdata is None else tuple(getattr(litdata, name) for name in names)


@contextmanager
def replica_environment(num_replicas: int, rank: int) -> Iterator[None]:
    """Let litdata, in this context, read ``num_replicas`` and ``rank`` as world size and rank from the environment."""
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
    """Return the number of replicas and the index of this process's replica; one replica without a trainer."""
    sampler = None if trainer is None else trainer.distributed_sampler_kwargs
    return (1, 0) if sampler is None else (sampler["num_replicas"], sampler["rank"])


def size_of_model(trainer: Any, name: str) -> int | None:
    """Return a size from the ``config`` of a trainer's model; ``None`` if the model has no such size.

    Args:
        trainer: trainer of the data module; ``None`` for none.
        name: ``"vocab_size"`` or ``"context_length"``, the name in ``GPTConfig``.
    """
    model = None if trainer is None else getattr(trainer, "lightning_module", None)
    config = getattr(model, "config", None)
    if callable(text := getattr(config, "get_text_config", None)):
        config, name = text(), _OTHER_NAMES.get(name, name)
    size = getattr(config, name, None)
    return size if isinstance(size, int) else None


def use_replica(source: Any, num_replicas: int, rank: int) -> None:
    """Make a litdata loader or dataset read the share of one replica.

    With several replicas the incomplete last batch is dropped, as litdata itself does in a distributed run, so that
    all replicas have the same number of batches.

    Args:
        source: a ``StreamingDataset``, a combination of such datasets, or a loader of either.
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
    """Return whether a loader reads one streaming dataset."""
    return isinstance(loader, DataLoader) and isinstance(loader.dataset, classes_of_litdata("StreamingDataset"))


def reads_streams(loader: object) -> bool:
    """Return whether a loader reads one or several streaming datasets; the length of several may be unknown."""
    combinations = classes_of_litdata("CombinedStreamingDataset", "ParallelStreamingDataset")
    return is_litdata(loader) or (isinstance(loader, DataLoader) and isinstance(loader.dataset, combinations))


def replica_loader(
    split: str,
    batch_size: int,
    *,
    replica: tuple[int, int],
    num_workers: int,
    collate_fn: Callable[[Any], Any] | None = None,
    **options: Any,
) -> StreamingDataLoader:
    """Return a loader of one replica's share of a litdata dataset, in the same order on every machine.

    Args:
        split: folder or URI of the dataset.
        batch_size: number of samples per replica and batch.
        replica: number of replicas, and the index of this one.
        num_workers: number of processes that load data; 0 loads in this process.
        collate_fn: collate function of the loader.
        **options: of litdata's ``StreamingDataset``; with several replicas an incomplete last batch is always left out.

    Raises:
        DataError: a chunk lies outside of the dataset's folder.
    """
    from litdata import StreamingDataLoader, StreamingDataset  # see classes_of_litdata

    # torch warns about tensors in a read-only memory map, but litdata copies them at once.
    warnings.filterwarnings("ignore", message="The given buffer is not writable", module="litdata")
    # Newer releases shuffle only within windows, which would put pieces of one document into the same batch.
    if "item_shuffle_window" in inspect.signature(StreamingDataset).parameters:
        options["item_shuffle_window"] = 0
    with replica_environment(*replica):
        dataset = StreamingDataset(split, **options)
        _check_names(dataset, split)
        more = {} if collate_fn is None else {"collate_fn": collate_fn}
        pinned = torch.cuda.is_available()
        loader = StreamingDataLoader(dataset, batch_size=batch_size, num_workers=num_workers, pin_memory=pinned, **more)
    _shuffle_as_everywhere(dataset)
    use_replica(loader, *replica)
    return loader


def check_enough(where: str, found: int, samples: str, needed: int, remedy: str) -> None:
    """Check that a dataset has enough samples, for instance for a batch of every replica.

    Raises:
        DataError: there are fewer than ``needed``.
    """
    if found < needed:
        raise DataError(
            f"{where} holds {found} {samples}, and at least {needed} are needed. {remedy}, lower batch_size, or"
            " give more"
        )


def _parts(source: Any) -> list[Any]:
    return [source] if isinstance(source, classes_of_litdata("StreamingDataset")) else list(source._datasets)


def _distributed_env(num_replicas: int, rank: int) -> Any:
    """Return litdata's private description of the world; only this function uses the private name."""
    from litdata.utilities.env import _DistributedEnv

    # One node is set on any cluster: with more nodes, litdata's order would depend on the nodes of the replicas.
    return _DistributedEnv(world_size=num_replicas, global_rank=rank, num_nodes=1)


def _resume_as_replica(loader: Any, num_replicas: int, rank: int) -> None:
    """Make a resuming loader accept checkpoints of other processes.

    litdata compares a checkpoint's world size and folders with its own. Here its world size is the number of replicas,
    and this process's folders replace those of the process that wrote the checkpoint.
    """
    load_state_dict = type(loader).load_state_dict

    def load_for_replica(state: dict[str, Any]) -> None:
        with replica_environment(num_replicas, rank):
            load_state_dict(loader, {**state, "dataset": _with_own_place(loader.dataset, state.get("dataset") or {})})

    loader.load_state_dict = load_for_replica


def _with_own_place(dataset: Any, saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of one or several datasets with this process's folders and URLs, which litdata compares.

    The caller must make sure that the data is the same.
    """
    if not isinstance(dataset, classes_of_litdata("StreamingDataset")):
        parts = ((str(number), part) for number, part in enumerate(_parts(dataset)))
        return {**saved, **{name: _with_own_place(part, saved[name]) for name, part in parts if name in saved}}
    if "input_dir_path" not in saved:
        return saved
    own = dataset.input_dir
    # Each process caches a remote dataset in its own folder; the checkpoint names that of the process that wrote it.
    path = own.path if own.url is None else None
    place = {"input_dir_path": path, "input_dir_url": own.url, "cache_dir_path": dataset.cache_dir.path}
    # litdata also compares the seed, which has no effect without shuffling.
    return {**saved, **place, **({} if dataset.shuffle else {"seed": dataset.seed})}


def _check_names(dataset: Any, split: str) -> None:
    # Check before a chunk is read or downloaded: litdata joins the names to its folders.
    for name in dataset.subsampled_files:
        if name != os.path.basename(name):
            raise DataError(f"{split} names a chunk {name!r} outside of its folder. Do not use this dataset")


def _shuffle_as_everywhere(dataset: Any) -> None:
    # On NFS, Lustre and the like, newer litdata distributes whole chunks, nearly in their order, and cuts all shares to
    # the smallest: replicas may get no data, sequences are lost, and a chunk without a sequence raises an IndexError.
    if (profile := getattr(dataset, "posix_fast", None)) is not None:
        dataset.posix_fast = replace(profile, kind="posix")
