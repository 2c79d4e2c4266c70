"""Nested batches and outputs: walking over their tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested tuples, lists, mappings and dataclasses, in their order."""
    if isinstance(tree, Tensor):
        yield tree
    else:
        for child in _children(tree):
            yield from tensors_of(child)


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return the same nesting with ``function`` applied to every tensor; other leaves are kept."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return _like_mapping(tree, {key: map_tensors(function, value) for key, value in tree.items()})
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(function, value) for value in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(function, value) for value in tree)
    if is_dataclass(tree) and not isinstance(tree, type):
        return replace(tree, **{f.name: map_tensors(function, getattr(tree, f.name)) for f in fields(tree) if f.init})
    return tree


def _children(tree: Any) -> list[Any]:
    if isinstance(tree, Mapping):
        return list(tree.values())
    if isinstance(tree, (tuple, list)):
        return list(tree)
    if is_dataclass(tree) and not isinstance(tree, type):
        return [getattr(tree, f.name) for f in fields(tree)]
    return []


def _like_mapping(tree: Mapping, items: dict) -> Any:
    # A subclass whose constructor takes no mapping (a default dict, a batch class with its own) falls back to a dict.
    try:
        return type(tree)(items)  # type: ignore[call-arg]
    except TypeError:
        return items
