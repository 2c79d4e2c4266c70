"""Asynchronous copies of device tensors to the host.

Copies go through pinned memory and overlap with computation. Tensors on the host are not copied. The host tensors
of the newest batch are remembered, so that the batch need not be copied back from the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_asyncpp.core.tree import map_tensors, tensors_of

_PIECE_BYTES = 64 * 2**20


class HostCopy:
    """Asynchronous copy to the host, ordered after all work launched before it.

    Args:
        tensor: tensor on any device; it may be freed at once, but must not change before :meth:`is_done`.

    Attributes:
        tensor: the copy, with the same memory layout; valid once :meth:`is_done`.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._ready: torch.cuda.Event | None = None
        self.tensor = tensor.detach()
        if tensor.is_cpu:
            return
        self.tensor = torch.empty_like(tensor, device="cpu", pin_memory=True)
        stream = _copy_stream(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            self.tensor.copy_(tensor.detach(), non_blocking=True)
            self._ready = stream.record_event()
        tensor.record_stream(stream)

    def is_done(self) -> bool:
        """Return whether the copy is complete."""
        return self._ready is None or self._ready.query()

    def wait(self) -> Tensor:
        """Wait for the copy, and return it."""
        if self._ready is not None:
            self._ready.synchronize()
        return self.tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's elements as a flat tensor of bytes, since communication backends support few dtypes.

    The result is on the same device; it shares the memory of a contiguous tensor.
    """
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def pieces_on_host(tensor: Tensor, piece_bytes: int = _PIECE_BYTES) -> Iterator[Tensor]:
    """Yield a tensor's elements as flat contiguous pieces on the host; at most two of them exist at a time."""
    flat = tensor.detach().contiguous().view(-1)
    for piece in flat.split(max(1, piece_bytes // flat.element_size())):
        yield HostCopy(piece).wait()


class Reading:
    """Asynchronous read of numbers from a device.

    All tensors are read in one copy, so the host waits for the device at most once, and not at all if the copy is
    complete before :meth:`get`. On a CPU the numbers are available at once.

    Args:
        tensors: tensors of any shape and real dtype; they may change afterwards.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._copy: HostCopy | None = None
        if not any(tensor.is_cuda for tensor in tensors):
            self._numbers = [t.reshape(-1).tolist() if t.ndim else [t.item()] for t in tensors]
            return
        flat = [tensor.detach().reshape(-1) for tensor in tensors]
        # Concatenate the tensors of each dtype first, so that few kernels are launched.
        by_dtype: dict[torch.dtype, list[int]] = {}
        for place, tensor in enumerate(flat):
            by_dtype.setdefault(tensor.dtype, []).append(place)
        self._order = [place for places in by_dtype.values() for place in places]
        self._sizes = [flat[place].numel() for place in self._order]
        device = next(tensor.device for tensor in flat if tensor.is_cuda)
        pieces = [torch.cat([flat[p].to(device, non_blocking=True) for p in places]) for places in by_dtype.values()]
        self._copy = HostCopy(torch.cat([piece.double() for piece in pieces]))

    def is_there(self) -> bool:
        """Return whether :meth:`get` returns without waiting."""
        return self._copy is None or self._copy.is_done()

    def get(self) -> list[list[float]]:
        """Return the numbers of each tensor as a flat list; wait for the copy."""
        if self._copy is not None:
            found = dict(zip(self._order, self._copy.wait().split(self._sizes)))
            self._copy = None
            self._numbers = [found[place].tolist() for place in range(len(found))]
        return self._numbers


class _Copy(NamedTuple):
    """Tensor on the device, its version counter at the time of the copy, and its source on the host."""

    reference: weakref.ref[Tensor]
    version: int
    source: Tensor


class HostBatch:
    """Record of the host tensors from which the newest batch was copied.

    Attributes:
        copies: id of a tensor on the device -> its record; empty on a CPU.
    """

    def __init__(self) -> None:
        self.copies: dict[int, _Copy] = {}

    def moved(self, batch: Any, copy: Any) -> None:
        """Record a batch that was copied to the device without other changes.

        Args:
            batch: batch on the host.
            copy: the same containers on the device; tensors that were already on the device are the same objects in
                both.
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
        """Return a batch in which host tensors replace their unchanged copies on the device."""
        return map_tensors(self._source, batch) if self.copies else batch

    def _source(self, tensor: Tensor) -> Tensor:
        copy = self.copies.get(id(tensor))
        if copy is None or copy.reference() is not tensor or copy.version != tensor._version:
            return tensor
        return copy.source


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


@lru_cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for all copies from a device; a single one, since torch has a pool of only 32 streams."""
    return torch.cuda.Stream(device, priority=-1)
