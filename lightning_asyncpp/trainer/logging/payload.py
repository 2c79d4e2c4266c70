"""What logged values are on their way: numbers at agreed places of the control message of their mini-batch.

The last stage attaches what its steps logged. What stands where (the schema) is exchanged only when it
changes. Every rank then logs the same value under the same name, so callbacks that decide on a metric decide alike
everywhere.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache

import torch
from torch import Tensor

from lightning_asyncpp.core.host_copies import Reading
from lightning_asyncpp.trainer.logging.log_recorder import Entry, Logged, Recorded, combined

_HEAD = 2  # schema; the first micro-batch whose loss is NaN, from 1, or 0
_ABSENT = -1.0  # in place of a weight: the batch did not log this name


class LoggedBatch:
    """Logged values of a mini-batch on their way from the device, as a payload of the control message.

    Args:
        recorded: what was logged.
        nan_places: of its batches, which micro-batch is the first whose loss is NaN, from 1; or 0.
        slots: how many names a payload has places for.

    Attributes:
        length: of the payload.
        schema: names and options of the values in the order of the payload, as JSON.
        schema_number: stands for it.
    """

    def __init__(self, recorded: Recorded, nan_places: Sequence[Tensor], slots: int) -> None:
        self.length = payload_length(slots)
        self.schema, self.schema_number = _encode_schema(tuple(recorded.places.values()))
        self._recorded, self._num_places = recorded, len(nan_places)
        self._reading = Reading([*nan_places, *recorded.tensors()])

    def is_there(self) -> bool:
        """Whether :meth:`get` need not wait."""
        return self._reading.is_there()

    def get(self) -> Tensor:
        """The payload, (length,) fp64 on the host; waits for the device."""
        numbers = [number for (number,) in self._reading.get()]
        self._recorded.settle(numbers[self._num_places :])
        payload = [float(self.schema_number), next(filter(None, numbers[: self._num_places]), 0.0)]
        for name in self._recorded.places:
            logged = self._recorded.values.get(name)
            payload += (0.0, _ABSENT) if logged is None else (logged.result(), logged.weight)
        payload += [0.0] * (self.length - len(payload))
        return torch.tensor(payload, dtype=torch.float64, device="cpu")


@lru_cache(maxsize=256)
def _encode_schema(entries: tuple[Entry, ...]) -> tuple[str, int]:
    """A schema, and a number that stands for it; 0 is the empty one's."""
    schema = json.dumps([asdict(entry) for entry in entries])
    return schema, zlib.crc32(schema.encode()) + 1 if entries else 0


def payload_length(slots: int) -> int:
    """Length of the vector that carries up to ``slots`` values."""
    return _HEAD + 2 * slots


def decode_schema(schema: str) -> list[Entry]:
    """Entries in the order of a payload, out of its schema."""
    return [Entry(**fields) for fields in json.loads(schema)]


def combine(payload: Tensor, layouts: Sequence[Sequence[Entry]]) -> list[Logged]:
    """Values of a mini-batch over the replicas that logged them.

    Args:
        payload: shape (replicas, payload length).
        layouts: what stands at the places, for each replica.

    Returns:
        For every entry its value and the weight that it stands for.
    """
    rows = []
    for row, entries in zip(payload.tolist(), layouts):
        for index, entry in enumerate(entries):
            value, weight = row[_HEAD + 2 * index : _HEAD + 2 * index + 2]
            if weight != _ABSENT:
                rows.append(Logged(entry, value, weight))
    return combined(rows) if len(layouts) > 1 else rows


def nan_micro_batch(payload: Tensor) -> int:
    """Which micro-batch of a replica was the first whose loss is NaN, from 1; 0 if none was."""
    return next((int(place) for place in payload[:, 1].tolist() if place), 0)
