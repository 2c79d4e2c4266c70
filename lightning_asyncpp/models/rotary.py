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
        head_dim: features per head, an even number.
        context_length: number of positions in the tables.
        base: base of the wavelengths.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, context_length: int, base: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.context_length = context_length
        self.base = base
        shape = (context_length, head_dim // 2)
        self.register_buffer("cos", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.register_buffer("sin", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the tables, in fp32, on the device where they are."""
        device = self.cos.device
        # The angles are taken in fp64: in fp32 the product of position and frequency is off by 1e-4 at position 4096.
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device="cpu") / self.head_dim
        positions = torch.arange(self.context_length, dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, self.base**-exponents)
        self.cos = angles.cos().to(device, torch.float32)
        self.sin = angles.sin().to(device, torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """Turn ``x`` (batch, heads, time, head_dim); returns the same shape and dtype."""
        time = x.shape[-2]
        cos, sin = self.cos[:time], self.sin[:time]  # (time, head_dim / 2)
        first, second = x.float().chunk(2, dim=-1)  # (batch, heads, time, head_dim / 2) each
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return turned.to(x.dtype)

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> RotaryEmbedding:
        # `module.to(torch.bfloat16)` rounds every floating-point buffer; the tables are computed anew instead.
        super()._apply(fn, recurse)
        if self.cos.dtype != torch.float32:
            self.reset_parameters()
        return self
