"""Rotary position embedding (RoPE)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """Turns pairs of query and key features by an angle that grows with the position.

    The tables stay in fp32 whatever the rest of the module is converted to: positions beyond 256 are not even whole
    numbers in bf16.

    Args:
        dim: features per head that are turned, an even number: the first ones.
        context_length: number of positions in the tables.
        base: base of the wavelengths.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, dim: int, context_length: int, base: float) -> None:
        super().__init__()
        self.dim = dim
        self.context_length = context_length
        self.base = base
        shape = (context_length, dim // 2)
        self.register_buffer("cos", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.register_buffer("sin", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the tables, in fp32, on the device where they are."""
        device = self.cos.device
        if device.type == "meta":  # nothing to fill, and the angles of a long context take half a second per block
            self.cos, self.sin = self.cos.float(), self.sin.float()
            return
        # The angles are taken in fp64: in fp32 the product of position and frequency is off by 1e-4 at position 4096.
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float64, device="cpu") / self.dim
        positions = torch.arange(self.context_length, dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, self.base**-exponents)
        self.cos = angles.cos().to(device, torch.float32)
        self.sin = angles.sin().to(device, torch.float32)

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """Turn ``x`` (batch, heads, time, head_dim), from position ``start`` on; returns the same shape and dtype."""
        end = start + x.shape[-2]
        cos, sin = self.cos[start:end], self.sin[start:end]  # (time, dim / 2)
        half, rest = self.dim // 2, x.shape[-1] - self.dim
        first, second, kept = x.float().split((half, half, rest), dim=-1)  # (batch, heads, time, ...) each
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin, kept), dim=-1)
        return turned.to(x.dtype)

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> RotaryEmbedding:
        # `module.to(torch.bfloat16)` rounds every floating-point buffer; the tables are computed anew instead.
        super()._apply(fn, recurse)
        if self.cos.dtype != torch.float32:
            self.reset_parameters()
        return self
