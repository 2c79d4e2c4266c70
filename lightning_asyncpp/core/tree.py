"""Nested batches and outputs: iteration over tensors, merging of step outputs, serialisation between stages.

Merged outputs are what the step would have returned for the whole batch. Between stages, outputs are split into tensors
and the containers around them. The containers are sent as JSON, so that nothing from another process is executed. JSON
cannot restore users' classes, so outputs that contain them are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from itertools import chain
from numbers import Real
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from lightning_asyncpp.errors import ConfigurationError

T = TypeVar("T")


def leaves_of(tree: Any) -> Iterator[Any]:
    """Yield the leaves of nested tuples, lists, mappings and dataclasses; an empty container is a leaf."""
    children = [] if isinstance(tree, Tensor) else children_of(tree)
    if not children:
        yield tree
    for child in children:
        yield from leaves_of(child)


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors among the leaves."""
    return (leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor))


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return the same containers with ``function`` applied to every tensor; other leaves are kept."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def map_leaves(function: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool] = lambda node: False) -> Any:
    """Return the same containers with ``function`` applied to every leaf.

    Args:
        function: leaf -> its replacement.
        tree: nested tuples, lists, mappings and dataclasses.
        is_leaf: container -> whether it is a leaf; called for outer containers first.
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
    """Return whether an object is a named tuple, whose constructor takes its entries one by one."""
    return isinstance(tree, tuple) and hasattr(tree, "_fields")


def children_of(tree: Any) -> list[Any]:
    """Return the entries of a tuple, list, mapping or dataclass, in order; none for a leaf."""
    kind = _kind_of(type(tree))  # type: ignore[arg-type]
    if kind == "":
        return []
    if kind == "mapping":
        return list(tree.values())
    if kind == "sequence":
        return list(tree)
    return [getattr(tree, f.name) for f in fields(tree)]


@lru_cache(maxsize=4096)  # cached, since isinstance(tree, Mapping) would dominate the cost
def _kind_of(kind: type) -> str:
    if issubclass(kind, Mapping):
        return "mapping"
    if issubclass(kind, (tuple, list)):
        return "sequence"
    return "dataclass" if is_dataclass(kind) else ""


def merge_outputs(results: Sequence[Any], weights: Sequence[float]) -> Any:
    """Merge the results of microbatches, in order.

    * Tensors and numpy arrays are concatenated along their first dimension. If other dimensions differ, as after
      padding to the longest sample of each microbatch, the result is the list of the microbatches' tensors.
    * Numbers and tensors without dimensions are averaged with the weights; integers become floats. Booleans
      of Python do not count as numbers.
    * Mappings are merged key by key into a dictionary with the keys of all microbatches; the value of a key is merged
      from the microbatches that have it.
    * Named tuples are merged entry by entry.
    * Lists and tuples that contain tensors or arrays, at any depth, and tuples that contain other containers, are
      merged entry by entry, as in ``return names, scores``. If their lengths differ, they are concatenated.
    * Other lists and tuples, such as one string, number or list of strings per sample, are concatenated.
    * If all results are ``None``, the merged result is ``None``. Anything else (strings, booleans, objects, results of
      different types) becomes the list of the microbatches' results.

    Lists and tuples keep their type.

    Args:
        results: one result per microbatch with samples.
        weights: weight of each result, in any unit. Averages ignore results of weight 0, unless all have weight 0.
    """
    if not results or all(result is None for result in results):
        return None
    for kind, merge in _KINDS.items():
        if all(isinstance(result, kind) for result in results):
            return merge(results, weights)
    return list(results)


def _like_mapping(tree: Mapping, items: dict) -> Any:
    # A subclass whose constructor takes no mapping, such as defaultdict, becomes a dict.
    try:
        return type(tree)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def _merge_tensors(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor | list[Tensor]:
    if all(tensor.ndim == 0 for tensor in tensors):
        weighed = _weighed(tensors, weights)
        total = sum(weight for _, weight in weighed)
        return torch.stack([tensor.detach() * (weight / total) for tensor, weight in weighed]).sum()
    # torch.cat accepts tensors of shape (0,) with those of any other shape.
    fit_together = _same_rows([tensor for tensor in tensors if tensor.shape != (0,)])
    return torch.cat(list(tensors)) if fit_together else list(tensors)


def _merge_arrays(arrays: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray | list[np.ndarray]:
    return np.concatenate(arrays) if _same_rows(arrays) else list(arrays)


def _same_rows(arrays: Sequence[Tensor] | Sequence[np.ndarray]) -> bool:
    return all(array.ndim for array in arrays) and len({tuple(array.shape[1:]) for array in arrays}) <= 1


def _merge_numbers(numbers: Sequence[Any], weights: Sequence[float]) -> float | list[Any]:
    if any(isinstance(number, bool) for number in numbers):
        return list(numbers)
    weighed = _weighed(numbers, weights)
    return sum(float(number) * weight for number, weight in weighed) / sum(weight for _, weight in weighed)


def _weighed(values: Sequence[T], weights: Sequence[float]) -> list[tuple[T, float]]:
    # Leave out values of weight 0: a mean over nothing is NaN, and 0 * NaN is NaN.
    return [(v, w) for v, w in zip(values, weights) if w] or [(value, 1.0) for value in values]


def _merge_mappings(mappings: Sequence[Mapping], weights: Sequence[float]) -> dict:
    merged = {}
    for key in dict.fromkeys(chain.from_iterable(mappings)):
        having = [(mapping[key], weight) for mapping, weight in zip(mappings, weights) if key in mapping]
        merged[key] = merge_outputs([value for value, _ in having], [weight for _, weight in having])
    return merged


def _merge_sequences(sequences: Sequence[Any], weights: Sequence[float]) -> Any:
    first = sequences[0]
    same_length = len({len(sequence) for sequence in sequences}) == 1
    if same_length and any(_is_structure(sequence) for sequence in sequences):
        merged = [merge_outputs(entries, weights) for entries in zip(*sequences)]
        return type(first)(*merged) if is_named_tuple(first) else type(first)(merged)
    joined = chain.from_iterable(sequences)
    return list(joined) if is_named_tuple(first) else type(first)(joined)


def _is_structure(sequence: Any) -> bool:
    if is_named_tuple(sequence) or _holds_tensors(sequence):
        return True
    # A tuple holds a step's results; a list of lists holds one list per sample.
    return isinstance(sequence, tuple) and any(isinstance(entry, (tuple, list, Mapping)) for entry in sequence)


def _holds_tensors(tree: Any) -> bool:
    return isinstance(tree, (Tensor, np.ndarray)) or any(_holds_tensors(child) for child in children_of(tree))


_KINDS: dict[type, Callable[[Sequence[Any], Sequence[float]], Any]] = {
    Tensor: _merge_tensors,
    np.ndarray: _merge_arrays,
    Real: _merge_numbers,
    Mapping: _merge_mappings,
    tuple: _merge_sequences,
    list: _merge_sequences,
}


# Types of entries in JSON. A tensor is null, since its data are sent separately.
_VALUE, _TUPLE, _LIST, _DICT = "value", "tuple", "list", "dict"
_PLAIN = (type(None), bool, int, float, str)
_TENSORS: set[type] = {Tensor, nn.Parameter}


def stands_for_tensors(kind: type) -> None:
    """Allow tensors of another class between stages, such as the planner's tensors without data."""
    _TENSORS.add(kind)


def flatten(output: Any, layer: str) -> tuple[tuple[Tensor, ...], bytes]:
    """Split a stage's output into its tensors and the structure around them.

    Args:
        output: tensor, or nested tuples, lists and dictionaries (with strings as keys) of tensors, ``None``, numbers,
            strings and booleans.
        layer: name of the layer that returned the output, for messages.

    Returns:
        Tensors in order, and the structure for :func:`unflatten`; it is b"" for a tensor or a flat tuple of tensors.

    Raises:
        ConfigurationError: ``output`` contains another type.
    """
    if type(output) in _TENSORS:
        return (output,), b""
    if type(output) is tuple and output and all(type(entry) in _TENSORS for entry in output):
        return output, b""
    tensors: list[Tensor] = []
    try:
        structure = json.dumps(_written(output, tensors), separators=(",", ":")).encode()
        if not tensors:
            raise _CannotCrossError(f"{type(output).__name__} without a tensor")
    except _CannotCrossError as found:
        raise ConfigurationError(
            f"a layer at a cut returned {found} (layer {layer!r}): the next stage can receive a tensor, or"
            " tuples, lists and dictionaries (with strings as keys) of tensors, None, numbers, strings and booleans;"
            " return these, or combine this layer and the next into one"
        ) from None
    return tuple(tensors), structure


def unflatten(tensors: list[Tensor], structure: bytes) -> Any:
    """Return the output that :func:`flatten` split; a tuple if there is no structure."""
    return _read(_parsed(structure), iter(tensors)) if structure else tuple(tensors)


class _CannotCrossError(Exception):
    """Output that cannot cross a cut; the message names it."""


def _written(node: Any, tensors: list[Tensor]) -> Any:
    if type(node) in _TENSORS:
        tensors.append(node)
        return None
    if type(node) in _PLAIN:
        return [_VALUE, node]
    if type(node) in (tuple, list):
        return [_TUPLE if type(node) is tuple else _LIST, [_written(entry, tensors) for entry in node]]
    if type(node) is dict:
        if strangers := [key for key in node if type(key) is not str]:
            raise _CannotCrossError(f"a dict with the key {strangers[0]!r}")
        return [_DICT, {key: _written(entry, tensors) for key, entry in node.items()}]
    raise _CannotCrossError(f"the named tuple {type(node).__name__}" if is_named_tuple(node) else type(node).__name__)


@lru_cache(maxsize=64)
def _parsed(structure: bytes) -> Any:
    """Parse JSON; cached, since nearly all messages on a link have the same structure. Do not change the result."""
    return json.loads(structure)


def _read(node: Any, tensors: Iterator[Tensor]) -> Any:
    if node is None:
        return next(tensors)
    kind, content = node
    if kind == _VALUE:
        return content
    if kind == _DICT:
        return {key: _read(entry, tensors) for key, entry in content.items()}
    entries = [_read(entry, tensors) for entry in content]
    return tuple(entries) if kind == _TUPLE else entries
