"""A header and the tensors that it announces in one message, where both ends know beforehand what it will hold.

A receive can be posted before the message is sent only if its size is known. The shapes of activations hardly ever
change, so the first that pass on a link say what is usual there. From then on every message is a *parcel*: a header
with room behind it for tensors that look as usual. Others travel after it on their own, and the room stays unused.
Both ends see the same headers in the same order, so they agree on the size of every message without a word.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_asyncpp.pipeline.header import HEADER_BYTES, Header, TensorInfo

POSTED = 2
_ALIGNMENT = 64


class _Room(NamedTuple):
    """Where a tensor lies in a parcel; the offset counts elements, not bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def of(self, message: Tensor) -> Tensor:
        return message.view(self.dtype).as_strided(self.shape, self.strides, self.offset)


class Envelope:
    """A message to send, a uint8 vector that can be filled again and again.

    Args:
        size: in bytes.
        rooms: where tensors go in it.
    """

    def __init__(self, size: int, rooms: list[_Room]) -> None:
        self.message = new_message(size)
        self._bytes = self.message.numpy().data
        with torch.inference_mode(False):
            self._tensors = [room.of(self.message) for room in rooms]

    def fill(self, header: Header, tensors: tuple[Tensor, ...]) -> None:
        """Write the header and, if they have their rooms here, the tensors."""
        header.write(self._bytes)
        for room, tensor in zip(self._tensors, tensors):
            room.copy_(tensor)


class Parcels:
    """What one end of a link knows about the size of its messages, which are counted from 0.

    Args:
        device: where the tensors live. Headers are host data, so only those on a CPU share a message with one.
    """

    def __init__(self, device: torch.device) -> None:
        self._learns = device.type == "cpu"
        self._usual: list[tuple[tuple[int, ...], torch.dtype]] = []
        self._rooms: list[_Room] = []
        self._size = HEADER_BYTES
        self._since = 0
        self._free: list[Envelope] = []

    def learn(self, index: int, infos: tuple[TensorInfo, ...]) -> None:
        """Note what message ``index`` announced; the first with tensors counts."""
        if self._usual or not infos or not self._learns:
            return
        self._usual = _looks(infos)
        end = HEADER_BYTES
        for info in infos:
            start = _aligned(end)
            end = start + info.num_bytes
            strides = torch.empty(info.shape, device="meta").stride()
            self._rooms.append(_Room(info.dtype, info.shape, strides, start // info.dtype.itemsize))
        self._size = _aligned(end)  # a whole number of elements of every dtype
        # The receives of so many messages were posted, with room for a header alone, before this one was read.
        self._since = index + POSTED

    def size(self, index: int) -> int:
        """Length of message ``index`` in bytes."""
        return self._size if self._is_parcel(index) else HEADER_BYTES

    def holds(self, index: int, infos: tuple[TensorInfo, ...]) -> bool:
        """Whether message ``index`` has room for tensors that look like this."""
        return self._is_parcel(index) and _looks(infos) == self._usual

    def pack(self, index: int, header: Header, tensors: tuple[Tensor, ...]) -> Envelope:
        """Return message ``index``, with the tensors inside if it holds them."""
        if not self._is_parcel(index):
            envelope = Envelope(HEADER_BYTES, [])
        else:
            envelope = self._free.pop() if self._free else Envelope(self._size, self._rooms)
        envelope.fill(header, tensors if self.holds(index, header.tensors) else ())
        return envelope

    def reuse(self, envelope: Envelope) -> None:
        """Take back an envelope whose message has been sent."""
        if self._usual and len(envelope.message) == self._size:
            self._free.append(envelope)

    def unpack(self, message: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors inside a message that holds them; they share its memory."""
        return tuple(room.of(message) for room in self._rooms)

    def _is_parcel(self, index: int) -> bool:
        return bool(self._usual) and index >= self._since


def new_message(size: int) -> Tensor:
    """Room for a message of ``size`` bytes; one that is made in an evaluation may serve the training that follows."""
    with torch.inference_mode(False):
        return torch.empty(size, dtype=torch.uint8)


def _looks(infos: tuple[TensorInfo, ...]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(info.shape, info.dtype) for info in infos]


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT
