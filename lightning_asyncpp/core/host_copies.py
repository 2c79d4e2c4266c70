"""Copies on the host of tensors and numbers on a device: asked for together and early, waited for late.

They travel through pinned memory, beside what is computed; a tensor that is on the host already stands for itself. What
the newest batch was copied from need not be copied back.
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
    """A copy on its way to the host, behind all that was launched before it, and beside what is computed from now on.

    Args:
        tensor: on any device; it may be let go of, but not changed before :meth:`is_done`.

    Attributes:
        tensor: the copy, with dimensions as they lie in the tensor's memory; not to be read before then.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._ready: torch.cuda.Event | None = None
        self.tensor = tensor.detach()
        if tensor.is_cpu:
            return
        self.tensor = torch.empty_like(tensor, device="cpu", pin_memory=True)
        stream = _beside(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            self.tensor.copy_(tensor.detach(), non_blocking=True)
            self._ready = stream.record_event()
        tensor.record_stream(stream)

    def is_done(self) -> bool:
        """Return whether the copy is there."""
        return self._ready is None or self._ready.query()

    def wait(self) -> Tensor:
        """The copy; waits for it."""
        if self._ready is not None:
            self._ready.synchronize()
        return self.tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """The elements of a tensor in order, as a flat tensor of bytes, where it is: backends know few dtypes.

    It is the tensor's own memory if that is contiguous.
    """
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def pieces_on_host(tensor: Tensor, piece_bytes: int = _PIECE_BYTES) -> Iterator[Tensor]:
    """The elements of a tensor in order, as flat contiguous pieces on the host; one or two of them exist at a time."""
    flat = tensor.detach().contiguous().view(-1)
    for piece in flat.split(max(1, piece_bytes // flat.element_size())):
        yield HostCopy(piece).wait()


def on_host(tensor: Tensor) -> Tensor:
    """The memory of a tensor if it is on the host, and a contiguous copy of it there otherwise."""
    if tensor.is_cpu:
        return tensor.detach()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    flat, begin = copy.view(-1), 0
    for piece in pieces_on_host(tensor):
        flat[begin : begin + len(piece)] = piece
        begin += len(piece)
    return copy


def empty_on_host(elements: int, like: Tensor) -> Tensor:
    """Room for what is copied to where ``like`` is: (elements,), of its dtype."""
    return torch.empty(elements, dtype=like.dtype, device="cpu", pin_memory=not like.is_cpu)


class Reading:
    """Numbers on their way from the device to the host.

    What is asked for together is one copy, behind all that was launched before it: so it waits for the device once at
    most, and not at all if the device has got there when somebody looks. On a CPU the numbers are there at once.

    Args:
        tensors: of any shape and real dtype; they may change afterwards.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._copy: HostCopy | None = None
        if not any(tensor.is_cuda for tensor in tensors):
            self._numbers = [t.reshape(-1).tolist() if t.ndim else [t.item()] for t in tensors]
            return
        flat = [tensor.detach().reshape(-1) for tensor in tensors]
        # Tensors of one dtype together, in few kernels.
        by_dtype: dict[torch.dtype, list[int]] = {}
        for place, tensor in enumerate(flat):
            by_dtype.setdefault(tensor.dtype, []).append(place)
        self._order = [place for places in by_dtype.values() for place in places]
        self._sizes = [flat[place].numel() for place in self._order]
        device = next(tensor.device for tensor in flat if tensor.is_cuda)
        pieces = [torch.cat([flat[p].to(device, non_blocking=True) for p in places]) for places in by_dtype.values()]
        self._copy = HostCopy(torch.cat([piece.double() for piece in pieces]))

    def is_there(self) -> bool:
        """Return whether :meth:`get` need not wait."""
        return self._copy is None or self._copy.is_done()

    def get(self) -> list[list[float]]:
        """The numbers of each tensor, in its order in memory."""
        if self._copy is not None:
            found = dict(zip(self._order, self._copy.wait().split(self._sizes)))
            self._copy = None
            self._numbers = [found[place].tolist() for place in range(len(found))]
        return self._numbers


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


@lru_cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    """The stream of all copies from a device: torch has 32 streams in all, and gives them out again and again."""
    return torch.cuda.Stream(device, priority=-1)
