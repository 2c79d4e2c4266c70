"""Nested content taken apart: its tensors, by name, and what is around them, small enough to be sent and stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

STORED = "__stored__"
"""Key of the dictionary that stands in a skeleton where a tensor was."""
_SHARD = "shard"
_Key = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype, str]


def take_apart(tree: Any, shard: str = "") -> tuple[Any, dict[str, Tensor]]:
    """Split nested dictionaries, lists and tuples into a skeleton and its tensors.

    Args:
        tree: the content; a tensor that it holds twice is taken out once.
        shard: what the tensors are stored in, kept in the skeleton.

    Returns:
        The skeleton, in which ``{STORED: name, ...}`` stands for a tensor, and name -> tensor, detached. A name is the
        path to the tensor, its keys joined by ``/``.

    Raises:
        ValueError: the tree has a dictionary with the key ``STORED``.
    """
    tensors: dict[str, Tensor] = {}
    known: dict[_Key, dict[str, Any]] = {}

    def walk(node: Any, path: str) -> Any:
        if isinstance(node, Tensor):
            if (key := _identity(node)) not in known:
                known[key] = _put(node.detach(), path, tensors, shard)
            return known[key]
        if type(node) in (list, tuple):
            return type(node)(walk(child, _joined(path, index)) for index, child in enumerate(node))
        if isinstance(node, Mapping):
            if STORED in node:
                raise ValueError(f"a dictionary at {path!r} has the key {STORED!r}, which stands for a tensor")
            return {key: walk(child, _joined(path, key)) for key, child in node.items()}
        return node

    return walk(tree, ""), tensors


def put_together(skeleton: Any, tensor_of: Callable[[Mapping[str, Any]], Any]) -> Any:
    """Fill a skeleton again.

    Args:
        skeleton: of :func:`take_apart`, or several merged.
        tensor_of: called with the entry that stands for a tensor; what it returns takes its place.
    """
    if is_entry(skeleton):
        return tensor_of(skeleton)
    if type(skeleton) in (list, tuple):
        return type(skeleton)(put_together(child, tensor_of) for child in skeleton)
    if isinstance(skeleton, Mapping):
        return {key: put_together(child, tensor_of) for key, child in skeleton.items()}
    return skeleton


def merged(skeletons: list[Any]) -> Any:
    """Join nested dictionaries, and lists of the same length; where several have a value, the last one's counts."""
    first, *others = skeletons
    for other in others:
        first = _merge(first, other)
    return first


def is_entry(node: Any) -> bool:
    """Whether it stands for a tensor."""
    return isinstance(node, Mapping) and STORED in node


def stored_in(entry: Mapping[str, Any], shard: str) -> dict[str, Any]:
    """The entry of the same tensor, stored in another place."""
    return {**entry, _SHARD: shard}


def shard_of(entry: Mapping[str, Any]) -> str:
    """What a tensor is stored in."""
    return str(entry[_SHARD])


def entry_shape(entry: Mapping[str, Any]) -> tuple[int, ...]:
    """Shape of the tensor that an entry stands for."""
    return tuple(entry["shape"])


def entry_dtype(entry: Mapping[str, Any]) -> torch.dtype:
    """Dtype of the tensor that an entry stands for.

    Raises:
        ValueError: the entry names none.
    """
    dtype = getattr(torch, str(entry["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{entry['dtype']!r} is no dtype of torch")
    return dtype


def entry_bytes(entry: Mapping[str, Any]) -> int:
    """Size of the tensor that an entry stands for, in bytes."""
    return math.prod(entry_shape(entry)) * entry_dtype(entry).itemsize


def entries_of(skeleton: Any) -> list[Mapping[str, Any]]:
    """All entries of a skeleton, in its order."""
    found: list[Mapping[str, Any]] = []
    put_together(skeleton, found.append)
    return found


def _identity(tensor: Tensor) -> _Key:
    layout = int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())
    return (tensor.untyped_storage().data_ptr() or id(tensor), *layout, tensor.dtype, str(tensor.device))


def _put(tensor: Tensor, path: str, tensors: dict[str, Tensor], shard: str) -> dict[str, Any]:
    name = path
    while name in tensors:  # keys such as 1 and "1"
        name += "~"
    tensors[name] = tensor
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {STORED: name, _SHARD: shard, "shape": list(tensor.shape), "dtype": dtype}


def _joined(path: str, key: object) -> str:
    return f"{path}/{key}" if path else str(key)


def _merge(first: Any, second: Any) -> Any:
    if isinstance(first, Mapping) and isinstance(second, Mapping) and not (is_entry(first) or is_entry(second)):
        both = {key: _merge(first[key], second[key]) for key in first.keys() & second.keys()}
        return {**first, **second, **both}
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return [_merge(*pair) for pair in zip(first, second)]
    return second
