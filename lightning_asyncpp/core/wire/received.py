"""Activations that a stage received, as its first layer sees them, and their gradients, which go back.

A received tensor is where this stage's graph begins, but as a leaf that needs a gradient it could not be changed in
place, which a layer may do with what another layer made (``x += ...``, ``ReLU(inplace=True)``). So it is handed out as
the result of a node, whose backward takes the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_asyncpp.core.wire.header import as_stored, order_of

with torch.inference_mode(False):
    # What the nodes hang on: autograd visits only what leads to a leaf that needs a gradient. It gets none.
    _ANCHOR = torch.empty(0, device="cpu", requires_grad=True)


class InputGradient:
    """Where the gradient of a received tensor arrives.

    It must not hold the tensor, whose node holds it: such a cycle is never collected.

    Args:
        like: the tensor, of real or complex numbers.
    """

    __slots__ = ("_device", "_dtype", "_gradient", "_order", "_shape")

    def __init__(self, like: Tensor) -> None:
        self._shape, self._dtype, self._device = like.shape, like.dtype, like.device
        self._order = order_of(like)
        self._gradient: Tensor | None = None

    def put(self, gradient: Tensor) -> None:
        """Keep the gradient, summed over all uses of the tensor."""
        self._gradient = gradient

    def get(self) -> Tensor:
        """The gradient that a backward brought, with dimensions as the tensor's lie in memory, as it travels.

        Zeros if nothing depended on the tensor.
        """
        gradient = self._gradient
        if gradient is None:
            gradient = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        return as_stored(gradient, self._order)


def begin(tensor: Tensor) -> tuple[Tensor, InputGradient]:
    """Let the graph begin at a received tensor.

    Returns:
        A tensor with the same memory that needs a gradient and is no leaf, and where its gradient arrives.
    """
    gradient = InputGradient(tensor)
    started: Tensor = _Begin.apply(_ANCHOR, tensor, gradient)
    return started, gradient


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor, gradient: InputGradient) -> Tensor:
        ctx.gradient = gradient
        return tensor.data  # not as a view: views that a custom function returns must not be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.gradient.put(gradient)
        return None, None, None
