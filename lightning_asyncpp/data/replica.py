"""Reading with litdata the share of the data that is this process's.

litdata divides a dataset by the world size. In a pipeline all stages of a replica must read the same batches, so the
division has to go by replicas instead.
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


_OTHER_NAMES = {"context_length": "max_position_embeddings"}  # of transformers


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


def size_of_model(trainer: Any, name: str) -> int | None:
    """Read a size from the ``config`` of a trainer's model; ``None`` if there is no such size.

    Args:
        trainer: of the data module; ``None`` for none.
        name: ``"vocab_size"`` or ``"context_length"``, as ``GPTConfig`` calls them.
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


def replica_loader(
    split: str,
    batch_size: int,
    *,
    replica: tuple[int, int],
    num_workers: int,
    shuffle: bool,
    drop_last: bool,
    seed: int,
    download_folder: str | None = None,
    item_loader: Any = None,
    transform: Callable[[Any], Any] | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
) -> StreamingDataLoader:
    """Return a loader of one replica's share of a litdata dataset, in the same order on every machine.

    Args:
        split: folder or URI of the dataset.
        batch_size: samples per replica and batch.
        replica: number of replicas, and the index of this one.
        num_workers: processes that load; 0 loads in this one.
        shuffle: whether the order differs from epoch to epoch.
        drop_last: whether to leave out an incomplete last batch.
        seed: of the order.
        download_folder: where the chunks of a URI go.
        item_loader, transform, collate_fn: as litdata takes them.

    Raises:
        DataError: a chunk lies outside of the dataset.
    """
    from litdata import StreamingDataLoader, StreamingDataset  # see classes_of_litdata

    # litdata reads tensors from a read-only map, which torch warns of, and copies them at once.
    warnings.filterwarnings("ignore", message="The given buffer is not writable", module="litdata")
    windows = "item_shuffle_window" in inspect.signature(StreamingDataset).parameters
    with replica_environment(*replica):
        dataset = StreamingDataset(
            split,
            cache_dir=download_folder,
            item_loader=item_loader,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=seed,
            transform=transform,
            # Newer releases shuffle sequences within windows of neighbours: batches of one document's pieces.
            **({"item_shuffle_window": 0} if windows else {}),
        )
        _check_names(dataset, split)
        more = {} if collate_fn is None else {"collate_fn": collate_fn}
        pinned = torch.cuda.is_available()
        loader = StreamingDataLoader(dataset, batch_size=batch_size, num_workers=num_workers, pin_memory=pinned, **more)
    _shuffle_as_everywhere(dataset)
    use_replica(loader, *replica)
    return loader


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


def _check_names(dataset: Any, split: str) -> None:
    # Before a chunk is read, or downloaded: litdata joins their names to its folders.
    for name in dataset.subsampled_files:
        if name != os.path.basename(name):
            raise DataError(f"{split} names a chunk {name!r} outside of its folder. Do not use this dataset")


def _shuffle_as_everywhere(dataset: Any) -> None:
    # Where files are on NFS, Lustre or the like, newer releases deal out whole chunks, nearly in their order, and cut
    # all shares to the smallest: replicas may get nothing, windows are lost, a chunk without a window is an IndexError.
    if (profile := getattr(dataset, "posix_fast", None)) is not None:
        dataset.posix_fast = replace(profile, kind="posix")
