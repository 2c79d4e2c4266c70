"""Which data a litdata dataset streams, wherever it lies, and in which order; no sample is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_asyncpp.data.digests import digest, ends_of, evenly
from lightning_asyncpp.data.replica import classes_of_litdata
from lightning_asyncpp.data.token_dataset import INDEX

_CHUNKS, _END_BYTES = 16, 4 * 2**10
Identity = dict[str, "str | int | float | bool | None"]


def stream_identity(dataset: Any, num_workers: int) -> Identity:
    """What decides the samples of a ``StreamingDataset``, or of several that are read in turn, and their order.

    Args:
        dataset: of litdata, told its replica.
        num_workers: processes of its loader, which the chunks are dealt out to.
    """
    workers = {"num_workers": max(1, num_workers)}
    if isinstance(dataset, classes_of_litdata("StreamingDataset")):
        return {**workers, **_order(dataset), **stream_contents(dataset)}
    found: Identity = {**workers, "seed": getattr(dataset, "_seed", None)}
    for number, part in enumerate(getattr(dataset, "_datasets", [])):
        told = {**_order(part), **stream_contents(part)}
        found.update({f"streams[{number}].{name}": value for name, value in told.items()})
    return found


def stream_contents(dataset: Any) -> Identity:
    """What a ``StreamingDataset`` holds, as far as it can be known without traffic.

    ``index``: of its chunks; ``part``: which part is read; ``chunks``: the ends of some of them, if they lie here;
    ``url``: where nothing else is known.
    """
    url = dataset.input_dir.url
    folder = None if dataset.input_dir.path is None else Path(dataset.input_dir.path)
    index = None if folder is None else _read(folder / INDEX)
    return {
        "index": None if index is None else _of_index(index),
        "part": None if index is None else _part(dataset, index),
        "chunks": None if index is None or folder is None or url is not None else _of_chunks(folder, index),
        "url": url if index is None else None,
    }


def same_stream(dataset: Any, path: str) -> bool | None:
    """Whether a folder of this machine holds what a ``StreamingDataset`` reads; ``None``: it is not there."""
    index = _read(Path(path) / INDEX)
    if index is None:
        return None
    own = stream_contents(dataset)
    there = {"index": _of_index(index), "chunks": _of_chunks(Path(path), index)}
    known = [(value, own[name]) for name, value in there.items() if None not in (value, own[name])]
    return bool(known) and all(a == b for a, b in known)


def _order(dataset: Any) -> Identity:
    profile = getattr(dataset, "posix_fast", None)
    shuffle = bool(dataset.shuffle)
    return {
        "shuffle": shuffle,
        "seed": dataset.seed if shuffle else None,
        "drop_last": bool(dataset.drop_last),
        "block_size": getattr(dataset.item_loader, "_block_size", None),
        "item_shuffle_window": getattr(dataset, "_item_shuffle_window", None) if shuffle else None,
        "window_shuffle": getattr(profile, "window_shuffle", False) if shuffle else None,
    }


def _part(dataset: Any, index: Mapping[str, Any]) -> str | None:
    """Which part is read, for ``StreamingDataset(subsample=...)``."""
    try:
        regions = [[int(place) for place in region] for region in dataset.region_of_interest]
        block = getattr(dataset.item_loader, "_block_size", None)
        whole = sum(chunk["dim"] // block if block else chunk["chunk_size"] for chunk in index["chunks"])
        if sum(end - begin for begin, end in regions) == whole:
            return "all"
        return digest([json.dumps([dataset.subsampled_files, regions]).encode()])
    except (AttributeError, LookupError, TypeError, ValueError):
        return None


def _of_index(index: Mapping[str, Any]) -> str:
    # Not the rest: it says when and by which release of litdata it was written.
    config = index.get("config")
    kind = config.get("data_format") if isinstance(config, dict) else None
    return digest([json.dumps([index.get("chunks"), kind], sort_keys=True, default=str).encode()])


def _of_chunks(folder: Path, index: Mapping[str, Any]) -> str | None:
    try:
        names = [chunk["filename"] for chunk in index["chunks"]]
        return digest(ends_of(folder / names[place], _END_BYTES) for place in evenly(len(names), _CHUNKS))
    except (OSError, LookupError, TypeError):
        return None


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
