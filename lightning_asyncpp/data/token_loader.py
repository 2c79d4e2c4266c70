"""Batches of token sequences, read by litdata alike on every machine."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.imports import RequirementCache
from torch import Tensor

from lightning_asyncpp.data.replica import replica_environment, use_replica

if TYPE_CHECKING:
    from litdata import StreamingDataLoader, StreamingDataset

_HAS_PROFILES = RequirementCache("litdata>=0.2.68")
"""Orders sequences by the kind of the file system unless told otherwise."""
_HAS_WINDOWS = RequirementCache("litdata>=0.2.74")
"""Shuffles sequences within windows unless told otherwise."""


def token_loader(
    split: str,
    *,
    sequence_length: int,
    batch_size: int,
    num_workers: int,
    shuffle: bool,
    drop_last: bool,
    seed: int,
    replica: tuple[int, int],
    download_folder: str | None,
    transform: Callable[[Tensor], Tensor],
) -> StreamingDataLoader:
    """Return the batches of one replica.

    Args:
        split: folder or URI of a litdata dataset of tokens.
        sequence_length: tokens per sample.
        batch_size: sequences per replica and batch.
        num_workers: processes that load; 0 loads in this one.
        shuffle: whether the order differs from epoch to epoch.
        drop_last: whether to leave out an incomplete last batch.
        seed: of the order.
        replica: number of replicas, and the index of this one.
        download_folder: where the chunks of a URI go.
        transform: called with each sequence.

    Raises:
        RuntimeError: this release of litdata has no more what its order is held constant by.
    """
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader  # see classes_of_litdata

    # litdata reads tokens from a read-only map, which torch warns of, and copies them at once.
    warnings.filterwarnings("ignore", message="The given buffer is not writable", module="litdata")
    with replica_environment(*replica):
        dataset = StreamingDataset(
            split,
            cache_dir=download_folder,
            item_loader=TokensLoader(block_size=sequence_length),
            shuffle=shuffle,
            drop_last=drop_last,
            seed=seed,
            transform=transform,
            **_full_shuffle(StreamingDataset),
        )
        pinned = torch.cuda.is_available()
        loader = StreamingDataLoader(dataset, batch_size=batch_size, num_workers=num_workers, pin_memory=pinned)
    _shuffle_as_everywhere(dataset)
    use_replica(loader, *replica)
    return loader


def _full_shuffle(dataset_class: type[StreamingDataset]) -> dict[str, Any]:
    # These releases shuffle sequences within windows of neighbours: batches of one document's pieces.
    if "item_shuffle_window" in inspect.signature(dataset_class).parameters:
        return {"item_shuffle_window": 0}
    _refuse_if(_HAS_WINDOWS, "StreamingDataset(item_shuffle_window=...)")
    return {}


def _shuffle_as_everywhere(dataset: StreamingDataset) -> None:
    # Where files are on NFS, Lustre or the like, these releases deal out whole chunks, nearly in their order, and cut
    # all shares to the smallest: replicas may get nothing, windows are lost, a chunk without a window is an IndexError.
    if not hasattr(dataset, "posix_fast"):
        _refuse_if(_HAS_PROFILES, "StreamingDataset.posix_fast")
        return
    profile = dataset.posix_fast
    if profile is None:
        return
    try:
        dataset.posix_fast = replace(profile, kind="posix")
        is_usual = not dataset.posix_fast.window_shuffle
    except (AttributeError, TypeError):
        is_usual = False
    if not is_usual:
        _refuse_if(_HAS_PROFILES, "StreamingDataset.posix_fast.kind, which `window_shuffle` goes by")


def _refuse_if(expected: RequirementCache, name: str) -> None:
    """Refuse a litdata that should have a name and does not: its order would be another, and nobody would know.

    Raises:
        RuntimeError: it is not known to be older.
    """
    if expected:
        raise RuntimeError(
            f"litdata {version('litdata')} has no `{name}`, which is needed for the order of sequences to be the same "
            "on all file systems and in all releases. Install a version that this package was tested with: "
            "pip install litdata==0.2.76"
        )
