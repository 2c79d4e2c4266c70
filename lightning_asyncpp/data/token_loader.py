"""Batches of token sequences, read by litdata alike on every machine."""

from __future__ import annotations

import inspect
import os
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_asyncpp.data.errors import DataError
from lightning_asyncpp.data.replica import replica_environment, use_replica

if TYPE_CHECKING:
    from litdata import StreamingDataLoader


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
) -> StreamingDataLoader:
    """Return the batches of one replica: (batch_size, sequence_length) int64 each.

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

    Raises:
        DataError: a chunk lies outside of the dataset.
    """
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader  # see classes_of_litdata

    # litdata reads tokens from a read-only map, which torch warns of, and copies them at once.
    warnings.filterwarnings("ignore", message="The given buffer is not writable", module="litdata")
    windows = "item_shuffle_window" in inspect.signature(StreamingDataset).parameters
    with replica_environment(*replica):
        dataset = StreamingDataset(
            split,
            cache_dir=download_folder,
            item_loader=TokensLoader(block_size=sequence_length),
            shuffle=shuffle,
            drop_last=drop_last,
            seed=seed,
            transform=as_int64,
            # Newer releases shuffle sequences within windows of neighbours: batches of one document's pieces.
            **({"item_shuffle_window": 0} if windows else {}),
        )
        _check_names(dataset, split)
        pinned = torch.cuda.is_available()
        loader = StreamingDataLoader(dataset, batch_size=batch_size, num_workers=num_workers, pin_memory=pinned)
    _shuffle_as_everywhere(dataset)
    use_replica(loader, *replica)
    return loader


def as_int64(tokens: Tensor) -> Tensor:
    """Return tokens as embeddings take them; a function of a module, since litdata's workers are sent a pickled one."""
    return tokens.long()


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
