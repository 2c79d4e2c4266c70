"""Neighbours that are not there: what a stage would be sent is made up, what it sends is noted and let go of."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_asyncpp.pipeline.wire.header import Header
from lightning_asyncpp.pipeline.wire.transport import Arrival


class Loopback:
    """Takes the place of a stage's :class:`~lightning_asyncpp.pipeline.wire.transport.Transport`.

    Args:
        arriving: header of what the stage before sends; None on the first stage.

    Attributes:
        sent: header of what this stage sent last.
    """

    def __init__(self, arriving: Header | None) -> None:
        self.arriving = arriving
        self.sent: Header | None = None

    def receive_activation(self, k: int) -> Arrival:
        """New tensors as the stage before sends them."""
        assert self.arriving is not None
        tensors = tuple(torch.empty(i.shape, dtype=i.dtype, device="cpu") for i in self.arriving.tensors)
        return Arrival(self.arriving, tensors)

    def send_activation(self, header: Header, tensors: tuple[Tensor, ...]) -> None:
        """Note what is sent."""
        self.sent = header

    def receive_gradients(self, k: int, outputs: tuple[Tensor, ...]) -> list[Tensor]:
        """New tensors as the stage after sends them."""
        return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in outputs]

    def send_gradients(self, k: int, gradients: list[Tensor]) -> None:
        """They leave."""
