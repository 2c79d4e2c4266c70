"""What crosses a cut: tensors, and the tuples, lists and dictionaries around them.

Tensors travel as they are; what is around them is written as JSON beside them, so that nothing which comes from another
process is executed. It has to become on the next stage what it was, so classes of the user's are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from lightning_asyncpp.core.batches.tree import is_named_tuple
from lightning_asyncpp.errors import ConfigurationError

# How JSON tells what an entry is; a tensor is null, since its value comes beside.
_VALUE, _TUPLE, _LIST, _DICT = "value", "tuple", "list", "dict"
_PLAIN = (type(None), bool, int, float, str)
_TENSORS: set[type] = {Tensor, nn.Parameter}


def stands_for_tensors(kind: type) -> None:
    """Let tensors of a class of torch's own cross a cut: those without memory, which a plan runs stages on."""
    _TENSORS.add(kind)


def flatten(output: Any, layer: str) -> tuple[tuple[Tensor, ...], bytes]:
    """Take what leaves a stage apart into its tensors, in their order, and the structure around them.

    Args:
        output: a tensor, or nested tuples, lists and dictionaries (with strings as keys) of tensors, ``None``, numbers,
            strings and booleans.
        layer: name of the layer that returned it, for messages.

    Returns:
        The tensors; and what :func:`unflatten` needs, nothing for a tensor and for a flat tuple of tensors.

    Raises:
        ConfigurationError: there is something else in it.
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
            f"a layer at a cut returned {found} (layer {layer!r}): what goes on to the next stage must be a tensor, or"
            " tuples, lists and dictionaries (with strings as keys) of tensors, None, numbers, strings and booleans;"
            " return its tensors so, or keep this layer and the next together in one"
        ) from None
    return tuple(tensors), structure


def unflatten(tensors: list[Tensor], structure: bytes) -> Any:
    """Return what was taken apart: a tuple if there is no structure."""
    return _read(_parsed(structure), iter(tensors)) if structure else tuple(tensors)


class _CannotCrossError(Exception):
    """Names what cannot be written."""


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
    """Read JSON; nearly all messages on a link have the same structure, and nobody changes it."""
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
