"""The layers of a dense block: grouped-query attention with rotary positions, and SwiGLU."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_asyncpp.models.cache import KeyValueCache
from lightning_asyncpp.models.config import GPTConfig
from lightning_asyncpp.models.rotary import RotaryEmbedding


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share a key and a value head.

    Attributes:
        cache: keys and values of the tokens before those that come in, while text is generated; else ``None``.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.kv_heads = config.kv_heads
        self.head_dim = config.head_width
        kv_width = config.kv_heads * config.head_width
        self.query = nn.Linear(config.dim, config.attention_width, bias=config.qkv_bias)
        self.key = nn.Linear(config.dim, kv_width, bias=config.qkv_bias)
        self.value = nn.Linear(config.dim, kv_width, bias=config.qkv_bias)
        self.projection = nn.Linear(config.attention_width, config.dim, bias=False)
        self.query_norm: nn.Module = nn.Identity()
        self.key_norm: nn.Module = nn.Identity()
        if config.qk_norm:
            self.query_norm = nn.RMSNorm(config.head_width, eps=config.norm_eps)
            self.key_norm = nn.RMSNorm(config.head_width, eps=config.norm_eps)
        self.rotary = RotaryEmbedding(config.rotary_dim, config.context_length, config.rope_base)
        self.cache: KeyValueCache | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Mix the positions of ``x`` (batch, time, dim); returns the same shape."""
        query = self._split_heads(self.query(x), self.heads)  # (batch, heads, time, head_dim)
        key = self._split_heads(self.key(x), self.kv_heads)  # (batch, kv_heads, time, head_dim)
        value = self._split_heads(self.value(x), self.kv_heads)  # (batch, kv_heads, time, head_dim)
        start = 0 if self.cache is None else self.cache.length
        query, key = self.rotary(self.query_norm(query), start), self.rotary(self.key_norm(key), start)
        if self.cache is not None:
            key, value = self.cache.extend(key, value)  # (batch, kv_heads, start + time, head_dim) each
        grouped = self.kv_heads != self.heads
        # Behind what is in the cache comes one token, which sees all of it.
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=start == 0, enable_gqa=grouped)
        projected: Tensor = self.projection(mixed.transpose(1, 2).flatten(2))
        return projected

    def _split_heads(self, x: Tensor, heads: int) -> Tensor:
        batch, time, _ = x.shape
        return x.view(batch, time, heads, self.head_dim).transpose(1, 2)  # (batch, heads, time, head_dim)


class SwiGLU(nn.Module):
    """The feed-forward layer: a linear map gated by the SiLU of another.

    Args:
        dim: width of input and output, in features.
        width: inner width.
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
        """Map ``x`` (..., dim) position by position; returns the same shape."""
        mapped: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return mapped
