"""Counts bytes that are alive, and bytes that are moved, while operators run on tensors without memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lightning_asyncpp.tools.plan.fake import DispatchMode, writes
from lightning_asyncpp.tools.plan.flops import FORMULAS


@dataclass
class Reading:
    """What happened during a part of a run.

    Attributes:
        kept: bytes that are alive after it and were not before; negative if more was let go of.
        peak: most bytes alive at a time, above those before it.
        moved: bytes that operators read and wrote, views left out.
        flops: floating-point operations of matrix products and attention.
    """

    kept: int = 0
    peak: int = 0
    moved: int = 0
    flops: int = 0


class Meter(DispatchMode):
    """Sees every operator and the memory behind every result, until it is let go of.

    Temporary memory inside of a kernel does not show: it has no tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive = 0
        self._peak = 0
        self._moved = 0
        self._flops = 0
        self._formulas = {**flop_registry, **FORMULAS}
        self._known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run the operator and take note of what it made."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        made = 0
        for tensor in _tensors(result):
            made += self._note(tensor)
        if made or writes(func):
            self._moved += made + sum(tensor.nbytes for tensor in _tensors((*args, *kwargs.values())))
        if (formula := self._formulas.get(func.overloadpacket)) is not None:
            self._flops += formula(*args, **kwargs, out_val=result)
        return result

    @contextmanager
    def reading(self) -> Iterator[Reading]:
        """Read what the body does; readings may not lie inside each other."""
        reading, before = Reading(), self.alive
        self._peak, self._moved, self._flops = self.alive, 0, 0
        yield reading
        reading.kept, reading.peak = self.alive - before, self._peak - before
        reading.moved, reading.flops = self._moved, self._flops

    def _note(self, tensor: Tensor) -> int:
        """Count the memory of a tensor if it is new; returns its bytes then."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known:
            return 0
        size = storage.nbytes()

        def release(_: object) -> None:
            self.alive -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, release)
        self.alive += size
        self._peak = max(self._peak, self.alive)
        return size


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind tensors, what they share counted once."""
    storages = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Tensors of a result or of arguments: lists of them are as deep as operators go."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for entry in tree:
            yield from _tensors(entry)
