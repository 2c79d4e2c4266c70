"""What decides which batches a training loader gives, in which order: a resume in mid-epoch must find it again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from lightning_utilities.core.imports import RequirementCache
from torch.utils.data import IterableDataset

from lightning_asyncpp.data.contents import contents_of
from lightning_asyncpp.data.replica import classes_of_litdata, is_litdata, reads_streams
from lightning_asyncpp.data.stream_identity import same_stream, stream_identity
from lightning_asyncpp.strategy_parts.stage_loader import LoaderInFront

IDENTITY = "identity"
"""Entry of a loader's state in a checkpoint: what :func:`loader_identity` returned."""
Plain = str | int | float | bool | None
HELD = ("contents", "files", "index")
"""What of it says what the data is, wherever it lies."""
_SAME_PLACES = {"contents", "files", "chunks"}  # the order of the epoch is what it was
_ELASTIC = RequirementCache("litdata>=0.2.69")
"""Deals out the rest of an epoch anew to batches of another size, or to another number of workers."""
_PLAIN_BATCHES = ("BatchSampler",)  # torch's and torchdata's


def loader_identity(loader: Any) -> dict[str, Plain]:
    """What decides the batches of a training loader: the same on all ranks, and wherever its data lies.

    ``None`` stands for what is not known, for instance on a machine without the data. Nothing is read from the dataset.

    Args:
        loader: of this replica, before it is read; with the sampler that orders it.
    """
    while isinstance(loader, LoaderInFront):
        loader = loader.loader
    found: dict[str, Any] = {}
    for facts in (_batches, _order, _data):
        try:
            found |= facts(loader)
        except Exception:  # of somebody else's class, or since the data is on another machine
            continue
    return {name: _plain(value) for name, value in found.items()}


def differing(now: Mapping[str, Plain], saved: Mapping[str, Plain] | None) -> list[str]:
    """Names of what is known of two loaders and differs; nothing if a checkpoint of an older release says nothing."""
    if saved is None:
        return []
    return [name for name, value in now.items() if None not in (value, saved.get(name)) and value != saved[name]]


def differences(now: Mapping[str, Plain], saved: Mapping[str, Plain] | None) -> list[str]:
    """In words, what a loader reads otherwise than the one of a checkpoint."""
    return [_in_words(name, now[name], (saved or {})[name]) for name in differing(now, saved)]


def keeps_place(loader: Any, names: Iterable[str]) -> bool:
    """Whether a loader can go on where another one was, from which it differs in these names.

    Args:
        loader: of this replica.
        names: of :func:`differing`.
    """
    if not reads_streams(loader):
        return set(names) <= {*_SAME_PLACES, "batch_size", "drop_last"}
    elastic = {"batch_size", "num_workers"} if _streams_one(loader) and _ELASTIC else set()
    return {name.rpartition(".")[2] for name in names} <= _SAME_PLACES | elastic


def problems_with_place(loader: Any, state: Mapping[str, Any]) -> list[str]:
    """Why it is not known whether a litdata dataset is the one of a checkpoint that does not say what it read.

    Args:
        loader: of this replica.
        state: of a ``ResumableLoader`` around such a loader.
    """
    inner = state.get("loader")
    if IDENTITY in state or not inner or not _streams_one(loader):  # a stage in the middle says nothing
        return []
    dataset = loader.dataset
    saved, own = inner["dataset"], dataset.input_dir
    before = saved["input_dir_url"] or saved["input_dir_path"]
    if (own.url or own.path) == before or before is None:
        return []
    if own.url is None and saved["input_dir_url"] is None and same_stream(dataset, before):
        return []
    return [
        f"the training data is read from {own.url or own.path}, and the checkpoint, which an older release wrote, knows"
        f" its data by the place alone: {before}"
    ]


def _streams_one(loader: Any) -> bool:
    """Whether it is litdata's loader of one of its datasets."""
    return isinstance(loader, classes_of_litdata("StreamingDataLoader")) and is_litdata(loader)


def _batches(loader: Any) -> dict[str, Any]:
    batches = getattr(loader, "batch_sampler", None)
    is_plain = batches is None or type(batches).__name__ in _PLAIN_BATCHES
    size = getattr(loader, "batch_size", None)
    return {
        "batch_sampler": None if is_plain else type(batches).__name__,
        "batch_size": getattr(batches, "batch_size", None) if size is None else size,
        "drop_last": None
        if reads_streams(loader)
        else getattr(loader if batches is None else batches, "drop_last", None),
    }


def _order(loader: Any) -> dict[str, Any]:
    dataset = getattr(loader, "dataset", None)
    if reads_streams(loader):
        return stream_identity(dataset, loader.num_workers)
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", getattr(loader, "sampler", None))
    if sampler is None or isinstance(dataset, IterableDataset):
        return {}
    shuffle = getattr(sampler, "shuffle", None)
    return {
        "sampler": type(sampler).__name__,
        "shuffle": shuffle,
        "seed": None if shuffle is False else getattr(sampler, "seed", None),
        "replacement": getattr(sampler, "replacement", None),
        "drawn_from": _drawn_from(sampler),
    }


def _drawn_from(sampler: Any) -> str | None:
    """A digest of the weights or the indices that a sampler draws from, as torch's call them."""
    given = {name: vars(sampler)[name] for name in ("weights", "indices") if name in vars(sampler)}
    return contents_of(given)["contents"] if given else None


def _data(loader: Any) -> dict[str, Any]:
    dataset = getattr(loader, "dataset", None)
    if dataset is None or reads_streams(loader):
        return {}
    return {"rows": _rows(dataset), **contents_of(dataset)}


def _rows(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:  # none, or the data is on another machine
        return None


def _plain(value: Any) -> Plain:
    if isinstance(value, np.generic):
        value = value.item()
    return value if isinstance(value, (str, int, float, bool)) else None


def _in_words(name: str, now: Plain, saved: Plain) -> str:
    held = name.rpartition(".")[2] in (*HELD, "chunks")
    what = f"other training data ({name}={now})" if held else f"{name}={now}"
    return f"{what}, and the checkpoint was written with {saved}"
