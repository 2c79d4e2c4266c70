"""Nested batches and outputs: walking over their tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor


def leaves_of(tree: Any) -> Iterator[Any]:
    """Yield what nested tuples, lists, mappings and dataclasses hold, in their order; an empty one is a leaf itself."""
    children = [] if isinstance(tree, Tensor) else children_of(tree)
    if not children:
        yield tree
    for child in children:
        yield from leaves_of(child)


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors among the leaves."""
    return (leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor))


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return the same nesting with ``function`` applied to every tensor; other leaves are kept."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def map_leaves(function: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool] = lambda node: False) -> Any:
    """Return the same nesting with ``function`` applied to every leaf.

    Args:
        function: leaf -> what stands in its place.
        tree: nested tuples, lists, mappings and dataclasses.
        is_leaf: node -> whether a container is taken as a leaf; asked from the outside in.
    """
    if isinstance(tree, Tensor) or is_leaf(tree):
        return function(tree)
    if is_named_tuple(tree):
        return type(tree)(*[map_leaves(function, value, is_leaf) for value in tree])
    if isinstance(tree, (tuple, list)):
        return type(tree)([map_leaves(function, value, is_leaf) for value in tree])
    if isinstance(tree, Mapping):
        return _like_mapping(tree, {key: map_leaves(function, value, is_leaf) for key, value in tree.items()})
    if is_dataclass(tree) and not isinstance(tree, type):
        values = {f.name: map_leaves(function, getattr(tree, f.name), is_leaf) for f in fields(tree) if f.init}
        return replace(tree, **values)
    return function(tree)


def is_named_tuple(tree: Any) -> bool:
    """Whether it is a tuple whose entries have names, which is made from its entries one by one."""
    return isinstance(tree, tuple) and hasattr(tree, "_fields")


def children_of(tree: Any) -> list[Any]:
    """Return the entries of a tuple, list, mapping or dataclass, in their order; of a leaf none."""
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
