"""What is left on the host of a batch that was moved to a GPU: read there, it costs no wait for the device."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from torch import Tensor

from lightning_asyncpp.core.batches.tree import map_tensors, tensors_of


class _Copy(NamedTuple):
    """A tensor on the device: who it is, how often it had been changed in place, and what it was copied from."""

    reference: weakref.ref[Tensor]
    version: int
    source: Tensor


class HostBatch:
    """Knows what the tensors of the newest batch were copied from.

    Attributes:
        copies: id of a tensor on the device -> what is known of it; empty on a CPU.
    """

    def __init__(self) -> None:
        self.copies: dict[int, _Copy] = {}

    def moved(self, batch: Any, copy: Any) -> None:
        """Remember a batch that was copied to the device, and nothing else was done to it.

        Args:
            batch: on the host.
            copy: the same nesting, on the device; tensors that were there already are those of ``batch``.
        """
        sources, copies = list(tensors_of(batch)), list(tensors_of(copy))
        self.copies = {}
        if len(sources) == len(copies) and all(map(_alike, sources, copies)):
            self.copies = {
                id(there): _Copy(weakref.ref(there), there._version, here)
                for here, there in zip(sources, copies)
                if here is not there and not there.is_inference()
            }

    def of(self, batch: Any) -> Any:
        """A batch with the host's tensors in place of its own, as far as they are known to be equal."""
        return map_tensors(self._source, batch) if self.copies else batch

    def _source(self, tensor: Tensor) -> Tensor:
        copy = self.copies.get(id(tensor))
        if copy is None or copy.reference() is not tensor or copy.version != tensor._version:
            return tensor
        return copy.source


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype
