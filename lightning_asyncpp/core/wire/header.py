"""What stands in front of every activation: how much it weighs, and which batch it belongs to.

What comes, a layout, is sent before the first activation and whenever it changes: shapes and dtypes of the tensors, and
what was around them. It tells in which order the dimensions of a tensor lie in memory, too. Where the next stage had
them otherwise than a single process (transposed, or with the channels last), a product of matrices would be rounded
differently, and a convolution would be slower.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

Order = tuple[int, ...]
"""Dimensions, the one with the largest stride first; empty: as they are numbered, which nearly all tensors are."""
_NUMBERS = struct.Struct("<dq")
HEADER_BYTES = _NUMBERS.size


class TensorInfo(NamedTuple):
    """Shape, dtype, whether a gradient comes back, and the order in memory, of one tensor of an activation."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool
    order: Order = ()

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: Tensor) -> TensorInfo:
        """That of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, order_of(tensor))

    def empty(self, device: torch.device) -> Tensor:
        """An uninitialised tensor that looks so."""
        if not self.order:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        return torch.empty_permuted(self.shape, self.order, dtype=self.dtype, device=device)

    def stored(self, tensor: Tensor) -> Tensor:
        """A tensor that looks so, as it travels: with its dimensions as they lie in memory."""
        return tensor.permute(self.order) if self.order else tensor


class Layout(NamedTuple):
    """What an activation looks like: its kind, its tensors, and what was around several of them."""

    kind: int = 0
    tensors: tuple[TensorInfo, ...] = ()
    structure: bytes = b""

    def pack(self) -> bytes:
        """It as JSON."""
        tensors = [(i.shape, str(i.dtype).removeprefix("torch."), i.needs_gradient, i.order) for i in self.tensors]
        return json.dumps((self.kind, tensors, self.structure.decode())).encode()

    @classmethod
    def read(cls, message: bytes) -> Layout:
        """Read what :meth:`pack` wrote."""
        kind, tensors, structure = json.loads(message)
        infos = [
            TensorInfo(tuple(shape), getattr(torch, dtype), needs_gradient, tuple(order))
            for shape, dtype, needs_gradient, order in tensors
        ]
        return cls(kind, tuple(infos), structure.encode())


@dataclass(slots=True)
class Header:
    """What is announced before the tensors of micro-batch ``k``.

    Attributes:
        k: the micro-batch, counted over the run (training) or over the evaluation.
        kind: a tensor, several tensors, an empty slot, or the news that the stage before failed.
        weight: the micro-batch's weight w_k.
        fingerprint: of the first stage's micro-batch; 0 where it was not taken.
        tensors: what follows.
        structure: what was around several tensors, as :func:`lightning_asyncpp.core.tree.flatten`
            wrote it; or why the stage before failed.
    """

    k: int
    kind: int = 0
    weight: float = 0.0
    fingerprint: int = 0
    tensors: tuple[TensorInfo, ...] = ()
    structure: bytes = b""

    TENSOR: ClassVar[int] = 0
    TUPLE: ClassVar[int] = 1
    EMPTY: ClassVar[int] = 2
    FAILED: ClassVar[int] = 3

    @property
    def num_bytes(self) -> int:
        """Size of the tensors that follow, in bytes."""
        return sum([info.num_bytes for info in self.tensors])

    @property
    def layout(self) -> Layout:
        """What is sent only when it changes."""
        return Layout(self.kind, self.tensors, self.structure)

    def pack(self) -> bytes:
        """The rest: ``HEADER_BYTES``."""
        return _NUMBERS.pack(self.weight, self.fingerprint)

    @classmethod
    def read(cls, message: memoryview | bytearray | bytes, k: int, layout: Layout) -> Header:
        """Read what :meth:`pack` wrote."""
        weight, fingerprint = _NUMBERS.unpack_from(message)
        return cls(k, layout.kind, weight, fingerprint, layout.tensors, layout.structure)


def order_of(tensor: Tensor) -> Order:
    """The order of a tensor, which may have gaps; a copy without any is what travels."""
    if tensor.is_contiguous():
        return ()
    order = tuple(tensor.dim_order())
    return () if order == tuple(range(tensor.ndim)) else order


def written_out(tensor: Tensor) -> Tensor:
    """The same numbers without gaps, and without a conjugation or a sign that torch has noted and not yet applied."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a tensor without gaps; a single number has none, whatever the stride of the view that took it."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
