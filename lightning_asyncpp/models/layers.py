"""Layers of a dense block: grouped-query attention with rotary positions, and SwiGLU."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_asyncpp.models.config import GPTConfig


class RotaryEmbedding(nn.Module):
    """Rotation of pairs of query and key features by an angle that grows with the position.

    The tables stay in fp32 when the module is converted to another dtype: bf16 would often round the entries of
    neighbouring positions to the same value.

    Args:
        dim: number of features per head, even.
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
        if device.type == "meta":  # nothing to fill; and computing many angles takes half a second per block
            self.cos, self.sin = self.cos.float(), self.sin.float()
            return
        # Angles are computed in fp64: in fp32 the product of position and frequency is off by 1e-4 at position 4096.
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float64, device="cpu") / self.dim
        positions = torch.arange(self.context_length, dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, self.base**-exponents)
        self.cos = angles.cos().to(device, torch.float32)
        self.sin = angles.sin().to(device, torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate ``x`` (batch, heads, time, head_dim), which begins at position 0; return the same shape and dtype."""
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]  # (time, dim / 2)
        first, second = x.float().chunk(2, dim=-1)  # (batch, heads, time, dim / 2) each
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return turned.to(x.dtype)

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> RotaryEmbedding:
        # `module.to(torch.bfloat16)` rounds every floating-point buffer; the tables are recomputed instead.
        super()._apply(fn, recurse)
        if self.cos is not None and self.cos.dtype != torch.float32:  # None on stages without this layer
            self.reset_parameters()
        return self


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share a key and a value head."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.kv_heads = config.kv_heads
        self.head_dim = config.head_width
        kv_width = config.kv_heads * config.head_width
        self.query = nn.Linear(config.dim, config.attention_width, bias=False)
        self.key = nn.Linear(config.dim, kv_width, bias=False)
        self.value = nn.Linear(config.dim, kv_width, bias=False)
        self.projection = nn.Linear(config.attention_width, config.dim, bias=False)
        self.query_norm: nn.Module = nn.Identity()
        self.key_norm: nn.Module = nn.Identity()
        if config.qk_norm:
            self.query_norm = nn.RMSNorm(config.head_width, eps=config.norm_eps)
            self.key_norm = nn.RMSNorm(config.head_width, eps=config.norm_eps)
        self.rotary = RotaryEmbedding(config.head_width, config.context_length, config.rope_base)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the positions of ``x`` (batch, time, dim); return the same shape."""
        query = self._split_heads(self.query(x), self.heads)  # (batch, heads, time, head_dim)
        key = self._split_heads(self.key(x), self.kv_heads)  # (batch, kv_heads, time, head_dim)
        value = self._split_heads(self.value(x), self.kv_heads)  # (batch, kv_heads, time, head_dim)
        query, key = self.rotary(self.query_norm(query)), self.rotary(self.key_norm(key))
        grouped = self.kv_heads != self.heads
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        projected: Tensor = self.projection(mixed.transpose(1, 2).flatten(2))
        return projected

    def _split_heads(self, x: Tensor, heads: int) -> Tensor:
        batch, time, _ = x.shape
        return x.view(batch, time, heads, self.head_dim).transpose(1, 2)  # (batch, heads, time, head_dim)


class SwiGLU(nn.Module):
    """Feed-forward layer: a linear map gated by the SiLU of another.

    Args:
        dim: width of input and output, in features.
        width: inner width, in features.
    """

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, width, bias=False)
        self.up = nn.Linear(dim, width, bias=False)
        self.down = nn.Linear(width, dim, bias=False)

    def initialize(self, std: float, output_std: float) -> None:
        """Draw the weights from the global generator, normal with these standard deviations."""
        for linear in (self.gate, self.up):
            nn.init.normal_(linear.weight, std=std)
        nn.init.normal_(self.down.weight, std=output_std)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (..., dim) position by position; return the same shape."""
        mapped: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return mapped
