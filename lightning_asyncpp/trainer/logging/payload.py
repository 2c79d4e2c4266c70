"""What logged values are on their way: numbers at agreed places of the control message of their mini-batch.

The last stage attaches its loss and what its steps logged. What stands where (the schema) is exchanged only when it
changes. Every rank then logs the same value under the same name, so callbacks that decide on a metric decide alike
everywhere.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_asyncpp.core.host_copies import Reading
from lightning_asyncpp.trainer.logging.log_recorder import Entry, Logged, Recorded, combined

_HEAD = 4  # schema, loss, weight of the loss, the first micro-batch whose loss is NaN (from 1, 0 for none)
_ABSENT = -1.0  # in place of a weight: the batch did not log this name


class BatchLoss(NamedTuple):
    """The mean loss of a batch, where it was computed.

    Attributes:
        loss: without micro-batches whose loss is NaN.
        weight: of the batch.
        nan_weight: of the micro-batches whose loss is NaN.
        first_nan: which is the first of them, from 1; 0 if none is.
    """

    loss: Tensor
    weight: float
    nan_weight: Tensor
    first_nan: Tensor


class LoggedBatch:
    """Losses and logged values of a mini-batch on their way from the device, as a payload of the control message.

    Args:
        recorded: what was logged.
        losses: of the batches of the mini-batch.
        slots: how many names a payload has places for.

    Attributes:
        length: of the payload.
        schema: names and options of the values in the order of the payload, as JSON.
    """

    def __init__(self, recorded: Recorded, losses: Sequence[BatchLoss], slots: int) -> None:
        self.length = payload_length(slots)
        self.schema = _encode_schema(tuple(recorded.places.values()))
        self._recorded, self._losses = recorded, list(losses)
        of_losses = [tensor for batch in losses for tensor in (batch.loss, batch.nan_weight, batch.first_nan)]
        self._reading = Reading([*of_losses, *recorded.tensors()])

    def is_there(self) -> bool:
        """Whether :meth:`get` need not wait."""
        return self._reading.is_there()

    def get(self) -> Tensor:
        """The payload, (length,) fp64 on the host; waits for the device."""
        numbers = [number for (number,) in self._reading.get()]
        end = 3 * len(self._losses)
        self._recorded.settle(numbers[end:])
        payload = [schema_number(self.schema), *self._mean_loss(numbers[:end])]
        for name in self._recorded.places:
            logged = self._recorded.values.get(name)
            payload += [0.0, _ABSENT] if logged is None else [logged.result(), logged.weight]
        payload += [0.0] * (self.length - len(payload))
        return torch.tensor(payload, dtype=torch.float64, device="cpu")

    def _mean_loss(self, numbers: Sequence[float]) -> tuple[float, float, float]:
        """Mean loss of the mini-batch's batches, its weight, and the first micro-batch whose loss is NaN, or 0.0."""
        if not self._losses:
            return 0.0, 0.0, 0.0
        first = next((place for place in numbers[2::3] if place), 0.0)
        known = [
            (loss, batch.weight - left_out)
            for loss, left_out, batch in zip(numbers[::3], numbers[1::3], self._losses)
            if not math.isnan(loss)
        ]
        weight = sum(w for _, w in known)
        return (sum(loss * w for loss, w in known) / weight if weight else math.nan), weight, first


@lru_cache(maxsize=256)
def _encode_schema(entries: tuple[Entry, ...]) -> str:
    return json.dumps([asdict(entry) for entry in entries])


def payload_length(slots: int) -> int:
    """Length of the vector that carries up to ``slots`` values."""
    return _HEAD + 2 * slots


def schema_number(schema: str) -> int:
    """A number that stands for a schema; 0 is the empty one's."""
    return 0 if schema == "[]" else zlib.crc32(schema.encode()) + 1


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
    return combined(rows)


def mean_loss(payload: Tensor) -> float:
    """Weighted mean of the replicas' losses, without those that are NaN, which have no weight."""
    weight = float(payload[:, 2].sum())
    losses = payload[:, 1].masked_fill(payload[:, 2] == 0, 0.0)
    return float((losses * payload[:, 2]).sum()) / weight if weight else float("nan")


def nan_micro_batch(payload: Tensor) -> int:
    """Which micro-batch of a replica was the first whose loss is NaN, from 1; 0 if none was."""
    return next((int(place) for place in payload[:, 3].tolist() if place), 0)
