"""A header and the tensors that it announces in one message, where both ends know beforehand what it will hold.

A receive can be posted before the message is sent only if its size is known. The shapes of activations hardly ever
change, so the first that pass on a link say what is usual there. From then on every message is a *parcel*: a header
with room behind it for tensors that look as usual. Others travel after it on their own, and the room stays unused.
Both ends see the same headers in the same order, so they agree on the size of every message without a word.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_asyncpp.pipeline.header import HEADER_BYTES, Header, TensorInfo

POSTED = 2
_ALIGNMENT = 64


class Parcels:
    """What one end of a link knows about the size of its messages, which are counted from 0.

    Args:
        device: where the tensors live. Headers are host data, so only those on a CPU share a message with one.
    """

    def __init__(self, device: torch.device) -> None:
        self._learns = device.type == "cpu"
        self._looks: list[tuple[tuple[int, ...], torch.dtype]] = []
        self._places: list[slice] = []
        self._size = HEADER_BYTES
        self._since = 0

    def learn(self, index: int, infos: tuple[TensorInfo, ...]) -> None:
        """Note what message ``index`` announced; the first with tensors counts."""
        if self._looks or not infos or not self._learns:
            return
        self._looks = _looks(infos)
        for info in infos:
            start = -(-self._size // _ALIGNMENT) * _ALIGNMENT
            self._size = start + info.num_bytes
            self._places.append(slice(start, self._size))
        # The receives of so many messages were posted, with room for a header alone, before this one was read.
        self._since = index + POSTED

    def size(self, index: int) -> int:
        """Length of message ``index`` in bytes."""
        return self._size if self._is_parcel(index) else HEADER_BYTES

    def holds(self, index: int, infos: tuple[TensorInfo, ...]) -> bool:
        """Whether message ``index`` has room for tensors that look like this."""
        return self._is_parcel(index) and _looks(infos) == self._looks

    def pack(self, index: int, header: Header, tensors: tuple[Tensor, ...]) -> Tensor:
        """Return message ``index``, a uint8 vector, with the tensors inside if it holds them."""
        if not self._is_parcel(index):
            return header.encode()
        message = torch.empty(self._size, dtype=torch.uint8)
        message[:HEADER_BYTES] = header.encode()
        if self.holds(index, header.tensors):
            for room, tensor in zip(self.unpack(message, header.tensors), tensors):
                room.copy_(tensor)
        return message

    def unpack(self, message: Tensor, infos: tuple[TensorInfo, ...]) -> tuple[Tensor, ...]:
        """Return the tensors inside a message that holds them; they share its memory."""
        return tuple(
            message[place].view(info.dtype).view(info.shape) for place, info in zip(self._places, infos, strict=True)
        )

    def _is_parcel(self, index: int) -> bool:
        return bool(self._looks) and index >= self._since


def _looks(infos: tuple[TensorInfo, ...]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(info.shape, info.dtype) for info in infos]
