"""What the last stage attaches to the control message of a mini-batch: its loss and what its steps logged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_asyncpp.pipeline.host_copies import Reading
from lightning_asyncpp.trainer.logging.log_recorder import Recorded, payload_length


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
    """

    def __init__(self, recorded: Recorded, losses: Sequence[BatchLoss], slots: int) -> None:
        self.length = payload_length(slots)
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
        payload = self._recorded.encode(numbers[end:], *self._mean_loss(numbers[:end]))
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
