"""What a dataset holds, told without reading from it: digests of the arrays and the files that it shows.

A dataset is never asked for a sample: that may draw random numbers, count, or open files before workers fork.
"""

from __future__ import annotations

import os
import re
import stat
from collections import UserDict
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_asyncpp.data.digests import digest, ends_of, evenly
from lightning_asyncpp.data.replica import classes_of_litdata
from lightning_asyncpp.data.stream_identity import stream_contents

_DEPTH = 6  # of datasets, lists and dictionaries in each other
_BLOCKS, _BLOCK = 64, 64  # of an array's values
_ITEMS, _ITEMS_BELOW, _FILES = 64, 16, 16  # of a list, of one in it, of one of paths
_MOST = 10_000  # things that are looked at
_FILLED = ("cache", "buffer", "memo")  # in the names of attributes that are filled while a dataset is read
_OF_A_PROCESS = re.compile(  # as keys
    "(^|_)(rank|device|host|hostname|pid|gpu|gpu_id|process_index|run_name|run_id|(log|output|save|checkpoint)_dir)$"
)
_TIME = re.compile("(^|_)(time|timestamp|now|start|started|created|t|t0)(_|$)", re.IGNORECASE)
_FIRST_TIME = 1e9  # seconds, in 2001
_WRITTEN = (".log", ".lock", ".tmp", ".pid")  # endings of files that are written while a run reads others
_Part = tuple[str, bytes]
_known: dict[int, tuple[ReferenceType[Any], dict[str, str | None]]] = {}
_known_parts: dict[int, tuple[ReferenceType[Any], int, list[_Part]]] = {}  # of those in others, too, and how deep


def contents_of(dataset: Any) -> dict[str, str | None]:
    """Digests of what a dataset shows: ``contents`` of arrays, lists and fingerprints, ``files`` of files.

    ``None``: it shows none, or not all of them, for instance since files are on another machine. What is shown are, in
    the attributes of the dataset and of datasets in it, tensors and NumPy arrays, lists and dictionaries of them or of
    plain values, and files that text or a path names. Of large ones a bounded sample is taken, evenly spread; of
    files the size and the ends. A ``fingerprint`` of a dataset, or the one of Hugging Face's, stands for all of it.
    Single values are left out, since they may count, and so is what is called a cache or a buffer, and in a dictionary
    the rank, the device and the time of a process. A dataset that was seen before in this process, by itself or in
    another one, holds what it held then: what it has read meanwhile may have filled others.

    Args:
        dataset: of a loader, before it is read.
    """
    found = _known.get(id(dataset))
    if found is not None and found[0]() is dataset:
        return found[1]
    try:
        told = _told(dataset)
    except Exception:  # somebody else's class: unknown
        told = {"contents": None, "files": None}
    with suppress(TypeError):  # of a list there is none
        _known[id(dataset)] = ref(dataset, partial(_forget, _known, id(dataset))), told
    return told


def _forget(known: dict[Any, Any], key: Any, _: ReferenceType[Any]) -> None:
    known.pop(key, None)


def _told(dataset: Any) -> dict[str, str | None]:
    parts = list(_Walk().dataset(dataset, _DEPTH))
    files = sorted(part for kind, part in parts if kind == "file")
    missing = any(kind == "missing" for kind, _ in parts)
    shown = sorted(part for kind, part in parts if kind == "value")
    return {
        "contents": digest(shown) if shown else None,
        "files": digest(files) if files and not missing else None,
    }


class _Walk:
    """Goes through what a dataset shows: parts of the kinds ``"value"``, ``"file"`` and ``"missing"``."""

    def __init__(self) -> None:
        self._left = _MOST
        self._above: list[int] = []

    def dataset(self, dataset: Any, depth: int) -> Iterator[_Part]:
        """What it shows; without the names of its attributes, which are its author's to change."""
        if depth == 0 or id(dataset) in self._above:
            return
        if isinstance(dataset, (Tensor, np.ndarray, list, tuple, dict)):
            yield from self._value(dataset, depth)
        elif isinstance(dataset, classes_of_litdata("StreamingDataset")):
            yield "value", str(stream_contents(dataset)["index"]).encode()
        elif (stated := _fingerprint(dataset)) is not None:
            yield "value", b"fingerprint" + stated.encode(errors="surrogatepass")
        else:
            yield from self._attributes(dataset, depth)

    def _attributes(self, dataset: Any, depth: int) -> list[_Part]:
        known = _known_parts.get(id(dataset))
        if known is not None and known[0]() is dataset and known[1] >= depth:
            return known[2]
        self._above.append(id(dataset))
        parts = [
            part
            for name, value in list(getattr(dataset, "__dict__", {}).items())
            if not _counts(value) and not any(word in name.lower() for word in _FILLED)
            for part in self._value(value, depth - 1)
        ]
        self._above.pop()
        if self._left:
            with suppress(TypeError):
                _known_parts[id(dataset)] = ref(dataset, partial(_forget, _known_parts, id(dataset))), depth, parts
        return parts

    def _value(self, value: Any, depth: int, listed: bool = False) -> Iterator[_Part]:
        """What an attribute shows, or a thing in a list or a dictionary."""
        if depth == 0 or self._left == 0:
            return
        self._left -= 1
        if isinstance(value, (Tensor, np.ndarray)):
            yield "value", _array(value)
        elif isinstance(value, (str, Path)):
            yield from _text(value, listed)
        elif isinstance(value, (bool, int, float, bytes, np.generic)) or value is None:
            if listed:
                yield "value", repr(value).encode()
        elif isinstance(value, range):
            yield "value", repr(value).encode()
        elif isinstance(value, (list, tuple)) and type(value).__getitem__ in (list.__getitem__, tuple.__getitem__):
            yield from self._list(value, depth, _ITEMS_BELOW if listed else _ITEMS)
        elif isinstance(held := value.data if isinstance(value, UserDict) else value, dict):
            yield from self._dictionary(held, depth)
        elif isinstance(value, Dataset) or _fingerprint(value) is not None:
            yield from self.dataset(value, depth - 1)

    def _dictionary(self, values: dict[Any, Any], depth: int) -> Iterator[_Part]:
        if len(values) > _MOST or not all(isinstance(key, str) for key in values):
            return  # it may be a cache, by index
        for key, value in sorted(dict.items(values), key=lambda item: item[0]):
            if _is_of_a_process(key, value):
                continue
            name = key.encode(errors="surrogatepass")
            yield from ((kind, name + part) for kind, part in self._value(value, depth - 1, listed=True))

    def _list(self, values: list[Any] | tuple[Any, ...], depth: int, most: int) -> Iterator[_Part]:
        paths = len(values) > 0 and isinstance(values[0], (str, Path)) and _names_file(values[0])
        places = evenly(len(values), _FILES if paths else most)
        parts = [list(self._value(values[place], depth - 1, listed=True)) for place in places]
        yield from (part for found in parts for part in found if part[0] != "value")
        shown = [[part for kind, part in found if kind == "value"] for found in parts]
        if any(shown):
            yield "value", digest([str(len(values)).encode(), *(digest(found).encode() for found in shown)]).encode()


def _fingerprint(dataset: Any) -> str | None:
    for name in ("fingerprint", "_fingerprint"):
        has_one = hasattr(type(dataset), name) or name in getattr(dataset, "__dict__", {})
        if has_one and isinstance(stated := getattr(dataset, name), str):
            return stated
    return None


def _counts(value: Any) -> bool:
    """Whether an attribute is a single value, which may be a counter."""
    if isinstance(value, (Tensor, np.ndarray)):
        return _size(value) <= 1
    return isinstance(value, (list, tuple)) and len(value) == 1 and isinstance(value[0], (bool, int, float))


def _is_of_a_process(key: str, value: Any) -> bool:
    """Whether an entry of settings is a process's own, which runs the script by itself."""
    if not isinstance(value, (bool, int, float, str)):
        return False
    is_time = isinstance(value, (int, float)) and value >= _FIRST_TIME and _TIME.search(key) is not None
    return is_time or _OF_A_PROCESS.search(key) is not None


def _text(value: str | Path, listed: bool) -> Iterator[_Part]:
    if not _names_file(value):
        if listed:
            yield "value", str(value).encode(errors="surrogatepass")
        return
    path = Path(value)
    try:
        if path.suffix not in _WRITTEN and stat.S_ISREG(path.stat().st_mode):
            yield "file", digest([ends_of(path)]).encode()
    except OSError:
        yield "missing", b""


def _names_file(value: str | Path) -> bool:
    """Whether it is a path, or text that can only be one or is one: of a file, though maybe of another machine."""
    if isinstance(value, Path):
        return True
    if len(value) > 4096 or "\0" in value or "\n" in value:
        return False
    return os.path.isabs(value) or ((os.sep in value or "." in value) and os.path.isfile(value))


def _size(array: Tensor | np.ndarray) -> int:
    return array.numel() if isinstance(array, Tensor) else int(array.size)


def _array(array: Tensor | np.ndarray) -> bytes:
    """Shape, type and some of the values of an array: all of a small one, else blocks of them, evenly spread."""
    facts = f"{tuple(array.shape)} {str(array.dtype).removeprefix('torch.')}"
    return digest([facts.encode(), _sample(array)]).encode()


def _sample(array: Tensor | np.ndarray) -> bytes:
    size = _size(array)
    if not size:
        return b""
    if isinstance(array, Tensor):
        if array.is_meta or array.layout != torch.strided or array.is_quantized:
            return b""
        places = np.unravel_index(_places(size), tuple(array.shape) or (1,))
        taken = array.detach().reshape(tuple(array.shape) or (1,))[tuple(torch.from_numpy(p) for p in places)]
        return taken.cpu().contiguous().resolve_conj().resolve_neg().view(torch.uint8).numpy().tobytes()
    values = np.atleast_1d(array)[np.unravel_index(_places(size), array.shape or (1,))]
    if not values.dtype.hasobject:
        return values.tobytes()
    plain = (str, bytes, bool, int, float)
    return digest(repr(v).encode(errors="surrogatepass") for v in values.tolist() if isinstance(v, plain)).encode()


def _places(size: int) -> np.ndarray:
    if size <= _BLOCKS * _BLOCK:
        return np.arange(size)
    starts = np.asarray(evenly(size - _BLOCK + 1, _BLOCKS))
    return (starts[:, None] + np.arange(_BLOCK)).reshape(-1)
