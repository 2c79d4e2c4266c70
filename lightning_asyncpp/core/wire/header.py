"""The header in front of every activation: what comes, how much it weighs, and which batch it belongs to.

A beginning of fixed length announces how long the rest is: descriptions of the tensors, and what was around them.

A description tells in which order the dimensions of a tensor lie in memory, too. Where the next stage had them
otherwise than a single process (transposed, or with the channels last), a product of matrices would be rounded
differently, and a convolution would be slower.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_asyncpp.core.batches.structure import MAX_STRUCTURE_BYTES
from lightning_asyncpp.errors import ConfigurationError, ProtocolError, different_calls

Order = tuple[int, ...]
"""Dimensions, the one with the largest stride first; empty: as they are numbered, which nearly all tensors are."""
MAX_TENSORS = 256
MAX_DIMENSIONS = 8
_MAGIC = 0x2B57A8
_BEGINNING = struct.Struct("<qqqdqqq")
BEGINNING_BYTES = _BEGINNING.size
_PER_TENSOR = struct.Struct(f"<{4 + MAX_DIMENSIONS}q")
_BITS = 3  # of a dimension's number, in an order
MAX_HEADER_BYTES = BEGINNING_BYTES + MAX_TENSORS * _PER_TENSOR.size + MAX_STRUCTURE_BYTES
_MOST_ELEMENTS = 2**56
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


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


@dataclass(slots=True)
class Header:
    """What is announced before the tensors of micro-batch ``k``.

    Attributes:
        k: the micro-batch, counted over the run (training) or over the evaluation.
        kind: a tensor, several tensors, an empty slot, or the news that the stage before failed.
        weight: the micro-batch's weight w_k.
        fingerprint: of the first stage's micro-batch; 0 where it was not taken.
        tensors: what follows.
        structure: what was around several tensors, as :func:`lightning_asyncpp.core.batches.structure.flatten`
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
        return _size_of(self.tensors)

    def pack(self) -> bytes:
        """The header as bytes: ``BEGINNING_BYTES``, and as many as :meth:`rest_of` reads from them."""
        # Bytes rather than torch.tensor(list), which takes ten times as long: this is sent for every micro-batch.
        numbers = self.fingerprint, len(self.tensors), len(self.structure)
        return _BEGINNING.pack(_MAGIC, self.kind, self.k, self.weight, *numbers) + _packed(self.tensors, self.structure)

    @classmethod
    def rest_of(cls, beginning: memoryview | bytearray | bytes) -> int:
        """How many bytes follow the first ``BEGINNING_BYTES`` of a header.

        Raises:
            ProtocolError: it is no header, or longer than one may be.
        """
        numbers = _BEGINNING.unpack_from(beginning)
        magic, kind, _, _, _, count, size, *_ = numbers
        known = magic == _MAGIC and cls.TENSOR <= kind <= cls.FAILED
        if not (known and 0 <= count <= MAX_TENSORS and 0 <= size <= MAX_STRUCTURE_BYTES):
            raise ProtocolError(f"not an activation header of this version: {numbers}")
        return int(count) * int(_PER_TENSOR.size) + int(size)

    @classmethod
    def read(cls, message: memoryview | bytearray | bytes, expected_k: int, max_bytes: int) -> Header:
        """Read and validate a whole header.

        Raises:
            ProtocolError: it is no header, is of another micro-batch, or announces more than ``max_bytes`` bytes.
        """
        end = BEGINNING_BYTES + cls.rest_of(message)
        _, kind, k, weight, mark, count, size = _BEGINNING.unpack_from(message)
        if k != expected_k:
            raise different_calls(f"expected micro-batch {expected_k} from the stage before, got {k}")
        tensors = _described(bytes(message[BEGINNING_BYTES : end - size]))
        may_have_more = kind in (cls.TUPLE, cls.FAILED)
        if not (_fits(kind, tensors) and (may_have_more or not size) and math.isfinite(weight) and weight >= 0):
            raise ProtocolError(
                f"micro-batch {k}: kind {kind}, weight {weight} and {count} tensors contradict each other"
            )
        header = cls(k, kind, weight, mark, tensors, bytes(message[end - size : end]))
        if header.num_bytes > max_bytes:
            raise ProtocolError(
                f"micro-batch {k} announces {header.num_bytes} bytes, more than max_message_bytes={max_bytes}"
            )
        return header


def describe(tensors: tuple[Tensor, ...], layer: str) -> tuple[TensorInfo, ...]:
    """Describe the tensors that leave a stage.

    Args:
        tensors: in their order.
        layer: name of the layer that returned them, for messages.

    Raises:
        ConfigurationError: more tensors, dimensions or other dtypes than a header can announce.
    """
    if len(tensors) > MAX_TENSORS:
        raise ConfigurationError(
            f"layer {layer!r} at a cut returned {len(tensors)} tensors; at most {MAX_TENSORS} may cross a cut: cut the"
            " model elsewhere (partition=[...]), or pack them into fewer (torch.stack, torch.cat)"
        )
    for tensor in tensors:
        if tensor.ndim > MAX_DIMENSIONS or tensor.dtype not in DTYPES or tensor.layout is not torch.strided:
            raise ConfigurationError(
                f"layer {layer!r} returned a tensor of shape {tuple(tensor.shape)}, dtype {tensor.dtype} and layout"
                f" {tensor.layout}, which cannot cross a cut: it may have {MAX_DIMENSIONS} dimensions, must be dense,"
                f" and of one of {', '.join(str(d).removeprefix('torch.') for d in DTYPES)}; convert it in this layer"
                " and back in the next, or cut the model elsewhere (partition=[...])"
            )
    return tuple([TensorInfo.of(tensor) for tensor in tensors])


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


@lru_cache(maxsize=64)
def _fits(kind: int, tensors: tuple[TensorInfo, ...]) -> bool:
    """Whether a message of this kind may announce these tensors."""
    counts = {Header.TENSOR: len(tensors) == 1, Header.TUPLE: len(tensors) >= 1}
    return counts.get(kind, not tensors) and all(
        i.dtype.is_floating_point or i.dtype.is_complex or not i.needs_gradient for i in tensors
    )


@lru_cache(maxsize=64)
def _size_of(tensors: tuple[TensorInfo, ...]) -> int:
    return sum(info.num_bytes for info in tensors)


@lru_cache(maxsize=64)
def _packed(tensors: tuple[TensorInfo, ...], structure: bytes) -> bytes:
    """Descriptions of tensors, and their structure; nearly all headers on a link hold the same ones."""
    encoded = []
    for info in tensors:
        shape = info.shape + (0,) * (MAX_DIMENSIONS - len(info.shape))
        order = sum(dimension << _BITS * place for place, dimension in enumerate(info.order))
        numbers = (DTYPES.index(info.dtype), int(info.needs_gradient), order, len(info.shape), *shape)
        encoded.append(_PER_TENSOR.pack(*numbers))
    return b"".join(encoded) + structure


@lru_cache(maxsize=64)
def _described(encoded: bytes) -> tuple[TensorInfo, ...]:
    """Read the descriptions of tensors; nearly all headers on a link hold the same ones."""
    return tuple(_decode_tensor(numbers) for numbers in _PER_TENSOR.iter_unpack(encoded))


def _decode_tensor(numbers: tuple[int, ...]) -> TensorInfo:
    dtype, needs_gradient, packed, dimensions, *shape = numbers
    known = 0 <= dtype < len(DTYPES) and 0 <= needs_gradient <= 1 and 0 <= dimensions <= MAX_DIMENSIONS
    if not (known and min(shape) >= 0 and not any(shape[dimensions:]) and _strides_fit(shape)):
        raise ProtocolError(f"malformed description of a tensor: {numbers}")
    order = tuple(packed >> _BITS * place & 2**_BITS - 1 for place in range(dimensions)) if packed else ()
    if order and (sorted(order) != list(range(dimensions)) or packed >> _BITS * dimensions):
        raise ProtocolError(f"malformed description of a tensor, whose order in memory is none: {numbers}")
    return TensorInfo(tuple(shape[:dimensions]), DTYPES[dtype], bool(needs_gradient), order)


def _strides_fit(shape: Sequence[int]) -> bool:
    """Whether torch can count the elements, also around an empty dimension, with which there are none."""
    return math.prod(max(size, 1) for size in shape) <= _MOST_ELEMENTS
