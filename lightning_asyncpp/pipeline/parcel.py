"""A header and the tensors that it announces in one message, where both ends know beforehand what it will hold.

A receive can be posted before the message is sent only if its size is known. The shapes of activations hardly ever
change, so what passed on a link says what is usual there. From then on every message is a *parcel*: a header with room
behind it for tensors that look as usual. Others travel after it on their own, and the room stays unused. Both ends see
the same headers in the same order, so they agree on the size of every message without a word.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_asyncpp.pipeline.header import HEADER_BYTES, Header, TensorInfo

POSTED = 2
_ALIGNMENT = 64
_Looks = list[tuple[tuple[int, ...], torch.dtype]]


class _Room(NamedTuple):
    """Where a tensor lies in a parcel; the offset counts elements, not bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def of(self, message: Tensor) -> Tensor:
        # .data: for autograd each tensor is one of its own; as views of the message they would share a version counter,
        # and a layer that changes one in place would spoil what was saved of another.
        return message.view(self.dtype).as_strided(self.shape, self.strides, self.offset).data


@dataclass
class Format:
    """How messages look from one of them on.

    Attributes:
        since: number of the first message.
        size: in bytes.
        looks: shape and dtype of the tensors that have room in it.
        rooms: where they lie.
        free: envelopes that can be filled again.
    """

    since: int
    size: int = HEADER_BYTES
    looks: _Looks = field(default_factory=list)
    rooms: list[_Room] = field(default_factory=list)
    free: list[Envelope] = field(default_factory=list)

    @classmethod
    def of(cls, infos: tuple[TensorInfo, ...], since: int) -> Format:
        """Room for a header and tensors like these."""
        end, rooms = HEADER_BYTES, []
        for info in infos:
            start = _aligned(end)
            end = start + info.num_bytes
            strides = torch.empty(info.shape, device="meta").stride()
            rooms.append(_Room(info.dtype, info.shape, strides, start // info.dtype.itemsize))
        # A whole number of elements of every dtype.
        return cls(since, _aligned(end), _looks(infos), rooms)


class Envelope:
    """A message to send, a uint8 vector that can be filled again and again.

    Args:
        format: of the message.
    """

    def __init__(self, format: Format) -> None:
        self.format = format
        self.message = new_message(format.size)
        self._bytes = self.message.numpy().data
        with torch.inference_mode(False):
            self._tensors = [room.of(self.message) for room in format.rooms]

    def fill(self, header: Header, tensors: tuple[Tensor, ...]) -> None:
        """Write the header and the tensors that have their rooms here, if any."""
        header.write(self._bytes)
        for room, tensor in zip(self._tensors, tensors):
            room.copy_(tensor)


class Parcels:
    """What one end of a link knows about its messages, which are numbered from 0.

    Args:
        device: where the tensors live. Headers are host data, so only those on a CPU share a message with one.
    """

    def __init__(self, device: torch.device) -> None:
        self._learns = device.type == "cpu"
        # Of the messages that may still be asked for: a format is learned POSTED messages before it counts.
        self._formats: deque[Format] = deque([Format(0)], maxlen=POSTED + 1)
        self._last_looks: _Looks = []

    def learn(self, number: int, infos: tuple[TensorInfo, ...]) -> None:
        """Note what message ``number`` announced.

        What comes twice in a row becomes usual, and the very first at once: it may be a validation of another size.
        """
        if not infos or not self._learns:
            return
        looks, usual = _looks(infos), self._formats[-1].looks
        if looks != usual and (not usual or looks == self._last_looks):
            # The receives of POSTED messages were posted before this one was read.
            self._formats.append(Format.of(infos, number + POSTED))
        self._last_looks = looks

    def size(self, number: int) -> int:
        """Length of message ``number`` in bytes."""
        return self._format(number).size

    def holds(self, number: int, infos: tuple[TensorInfo, ...]) -> bool:
        """Whether message ``number`` has room for tensors that look like this."""
        return bool(infos) and self._format(number).looks == _looks(infos)

    def pack(self, number: int, header: Header, inside: tuple[Tensor, ...]) -> Envelope:
        """Return message ``number``, which holds the tensors ``inside``, or none."""
        format = self._format(number)
        envelope = format.free.pop() if format.free else Envelope(format)
        envelope.fill(header, inside)
        return envelope

    def reuse(self, envelope: Envelope) -> None:
        """Take back an envelope whose message has been sent."""
        envelope.format.free.append(envelope)

    def unpack(self, number: int, message: Tensor) -> tuple[Tensor, ...]:
        """Return the usual tensors of message ``number``, should it hold them; they share its memory."""
        with torch.inference_mode(False):
            return tuple(room.of(message) for room in self._format(number).rooms)

    def _format(self, number: int) -> Format:
        return next(format for format in reversed(self._formats) if format.since <= number)


def new_message(size: int) -> Tensor:
    """Room for a message of ``size`` bytes; one that is made in an evaluation may serve the training that follows."""
    with torch.inference_mode(False):
        return torch.empty(size, dtype=torch.uint8, device="cpu")


def _looks(infos: tuple[TensorInfo, ...]) -> _Looks:
    return [(info.shape, info.dtype) for info in infos]


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT
