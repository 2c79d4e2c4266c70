"""Arguments and outputs as they travel: nested containers in which a mark stands for every tensor.

A mark says where the tensor is: in a table that travels beside, or among the outputs of an earlier block.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_asyncpp.core.batches.tree import children_of, leaves_of, map_leaves, tensors_of
from lightning_asyncpp.errors import ConfigurationError

_MARK = "@"
_PLAIN = (type(None), bool, int, float, str)
Output = tuple[int, int]
"""Position of a block, and number of a leaf of what it returned; of what it took the tensors are -1, -2, ..."""


class TensorTable:
    """The tensors of a call, each once, and what is found of them in arguments.

    Args:
        tensors: those that are known from the beginning.
        constants: objects that cross no cut, but are the same on every stage, by their positions.
        copies: whether to keep values as they are when they are met.

    Attributes:
        tensors: in the order in which they were met; one that was changed in place since stands there again.
        values: the copies.
    """

    def __init__(self, tensors: Sequence[Any] = (), constants: list[Any] | None = None, copies: bool = False) -> None:
        self.tensors: list[Any] = list(tensors)
        self.values: list[Tensor] = []
        self._copies = copies
        self._versions = [version_of(t) if isinstance(t, Tensor) else 0 for t in self.tensors]
        self.constants = constants if constants is not None else []
        self._outputs: dict[int, tuple[Output, int]] = {}
        self._held: list[Any] = []  # so that no other object gets their identity

    def know(self, block: int, output: Any) -> None:
        """Have the tensors of a block's output be recognised."""
        for leaf, value in enumerate(leaves_of(output)):
            if isinstance(value, Tensor):
                self._outputs[id(value)] = (block, leaf), version_of(value)
                self._held.append(value)

    def pack(self, value: Any, argument: str) -> Any:
        """What travels instead of a value.

        Args:
            value: nested tuples, lists and dictionaries.
            argument: its name, for messages.

        Raises:
            ConfigurationError: there is an object in it that cannot cross a cut.
        """
        if isinstance(value, Tensor):
            return self._mark_of(value)
        if type(value) in _PLAIN:
            return value
        if type(value) in (tuple, list):
            return type(value)(self.pack(entry, argument) for entry in value)
        if type(value) is dict and all(type(key) is str for key in value):
            return {key: self.pack(entry, f"{argument}.{key}") for key, entry in value.items()}
        return self._constant(value, argument)

    def is_changed(self, number: int) -> bool:
        """Whether a tensor was changed in place since it was met."""
        return version_of(self.tensors[number]) != self._versions[number]

    def is_made(self, tensor: Tensor, inputs: int) -> bool:
        """Whether a tensor that was packed is neither of the call, whose tensors are the first, nor of a block."""
        mark = self._mark_of(tensor)
        return bool(mark[_MARK] == "tensor" and mark["number"] >= inputs)

    def _mark_of(self, tensor: Tensor) -> dict[str, Any]:
        output, version = self._outputs.get(id(tensor), (None, 0))
        if output is not None and version_of(tensor) == version:  # else it was changed in place since
            return {_MARK: "output", "block": output[0], "leaf": output[1]}
        for number, known in enumerate(self.tensors):
            if known is tensor and not self.is_changed(number):
                return {_MARK: "tensor", "number": number}
        self.tensors.append(tensor)
        self._versions.append(version_of(tensor))
        if self._copies:
            self.values.append(tensor.detach().clone())
        return {_MARK: "tensor", "number": len(self.tensors) - 1}

    def _constant(self, value: Any, argument: str) -> dict[str, Any]:
        for number, known in enumerate(self.constants):
            if known is value or (type(known) is type(value) and _equal(known, value)):
                return {_MARK: "constant", "number": number}
        if next(tensors_of(value), None) is not None or not type(value).__module__.startswith("torch"):
            raise ConfigurationError(
                f"argument {argument!r} is a {type(value).__name__}, which cannot cross a cut: tensors, None, numbers,"
                " strings and booleans can, in tuples, lists and dictionaries (of a cache of keys and values: call the"
                " model with use_cache=False)"
            )
        self.constants.append(value)
        return {_MARK: "constant", "number": len(self.constants) - 1}


def taken(args: Any, kwargs: Any) -> dict[int, Tensor]:
    """The tensors that a block takes, by their numbers."""
    return {-1 - number: tensor for number, tensor in enumerate(tensors_of([list(args), kwargs]))}


def unpack(
    packed: Any, tensors: Sequence[Any], constants: Sequence[Any], output: Callable[[int, int], Any] = lambda *_: None
) -> Any:
    """Return what was packed.

    Args:
        packed: by a :class:`TensorTable`.
        tensors: of the table.
        constants: of the model.
        output: (block, leaf) -> the tensor.
    """
    if type(packed) is dict:
        if (kind := packed.get(_MARK)) is None:
            return {key: unpack(entry, tensors, constants, output) for key, entry in packed.items()}
        if kind == "output":
            return output(packed["block"], packed["leaf"])
        if "number" not in packed:  # a shape without a tensor
            return packed
        return (tensors if kind == "tensor" else constants)[packed["number"]]
    if type(packed) in (tuple, list):
        return type(packed)(unpack(entry, tensors, constants, output) for entry in packed)
    return packed


def outputs_in(packed: Any) -> set[Output]:
    """Outputs of blocks that what was packed refers to."""
    return {(mark["block"], mark["leaf"]) for mark in _marks(packed) if mark[_MARK] == "output"}


def tensor_numbers_in(packed: Any) -> list[int]:
    """Numbers of the tensors that what was packed refers to, each once, in their order."""
    return list(dict.fromkeys(mark["number"] for mark in _marks(packed) if mark[_MARK] == "tensor"))


def _marks(packed: Any) -> Iterator[dict[str, Any]]:
    if type(packed) is dict and _MARK in packed:
        yield packed
    elif type(packed) in (tuple, list, dict):
        for entry in packed.values() if type(packed) is dict else packed:
            yield from _marks(entry)


class Number:
    """Stands for a leaf in the template of an output.

    Args:
        number: of the leaf.
        kind: of it: a tensor, None or another value.
    """

    def __init__(self, number: int, kind: str) -> None:
        self.number, self.kind = number, kind


def template_of(output: Any) -> Any:
    """An output with marks in the places of its leaves, in the order of ``leaves_of``."""
    numbers = itertools.count()
    return map_leaves(lambda leaf: Number(next(numbers), structure_of(leaf)), output)


def filled(template: Any, leaves: Sequence[Any]) -> Any:
    """An output with other leaves in it."""
    return map_leaves(lambda leaf: leaves[leaf.number], template, lambda node: isinstance(node, Number))


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place, as far as torch counts it."""
    return 0 if tensor.is_inference() else tensor._version


def check_structure(template: Any, output: Any, name: str) -> None:
    """Refuse an output that has not tensors, and other leaves, where that of a template had them, under the same keys.

    Raises:
        ConfigurationError: what the module of this name returned is such a one.
    """
    if structure_of(template) != structure_of(output):
        raise ConfigurationError(
            f"{name} returned something else than with the example that pipelined(model, example) was given: more or"
            " fewer parts, or others; give an example that is like the batches, or the model pipeline_layers()"
        )


def structure_of(tree: Any) -> Any:
    """Keys and kinds of what an output, or its template, holds."""
    if isinstance(tree, Number):
        return tree.kind
    if isinstance(tree, Tensor):
        return "tensor"
    if not (children := children_of(tree)):
        return "None" if tree is None else "value"
    keys = list(tree) if isinstance(tree, Mapping) else None
    return [keys, *map(structure_of, children)]


def same(first: Any, second: Any) -> bool:
    """Whether two outputs or arguments hold the same values, tensors to the last bit."""
    ours, theirs = list(leaves_of(first)), list(leaves_of(second))
    return len(ours) == len(theirs) and all(_same_leaf(a, b) for a, b in zip(ours, theirs))


def _same_leaf(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())
    return type(a) is type(b) and (type(a) not in _PLAIN or a == b or a != a)


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:  # of somebody else's class
        return False
