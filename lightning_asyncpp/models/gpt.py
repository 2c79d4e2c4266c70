"""A dense GPT: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_asyncpp.models.config import GPTConfig
from lightning_asyncpp.models.rotary import RotaryEmbedding


class TokenEmbedding(nn.Module):
    """First unit: token ids to vectors. It refuses sequences that are too long for the units behind it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.init_std = config.init_std
        self.context_length = config.context_length
        self.token = nn.Embedding(config.vocab_size, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights from the global generator."""
        nn.init.normal_(self.token.weight, std=self.init_std)

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up ``tokens`` (batch, time) int64; returns (batch, time, dim).

        Raises:
            ValueError: ``time`` is above the model's ``context_length``.
        """
        # Here and not in the model: a pipeline calls the units, and the model's own forward never.
        if tokens.shape[-1] > self.context_length:
            raise ValueError(
                f"sequences of {tokens.shape[-1]} tokens do not fit context_length={self.context_length}; "
                "shorten them or build the model with a longer context"
            )
        embedded: Tensor = self.dropout(self.token(tokens))
        return embedded


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share a key and a value head."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.kv_heads = config.kv_heads
        self.head_dim = config.head_dim
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.value = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.projection = nn.Linear(config.dim, config.dim, bias=False)
        self.rotary = RotaryEmbedding(config.head_dim, config.context_length, config.rope_base)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the positions of ``x`` (batch, time, dim); returns the same shape."""
        query = self.rotary(self._split_heads(self.query(x), self.heads))  # (batch, heads, time, head_dim)
        key = self.rotary(self._split_heads(self.key(x), self.kv_heads))  # (batch, kv_heads, time, head_dim)
        value = self._split_heads(self.value(x), self.kv_heads)  # (batch, kv_heads, time, head_dim)
        grouped = self.kv_heads != self.heads
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        projected: Tensor = self.projection(mixed.transpose(1, 2).flatten(2))
        return projected

    def _split_heads(self, x: Tensor, heads: int) -> Tensor:
        batch, time, _ = x.shape
        return x.view(batch, time, heads, self.head_dim).transpose(1, 2)  # (batch, heads, time, head_dim)


class SwiGLU(nn.Module):
    """The feed-forward layer: a linear map gated by the SiLU of another."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.mlp_width, bias=False)
        self.up = nn.Linear(config.dim, config.mlp_width, bias=False)
        self.down = nn.Linear(config.mlp_width, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (batch, time, dim) position by position; returns the same shape."""
        mapped: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return mapped


class Block(nn.Module):
    """Middle unit: attention and feed-forward, each normalised before and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.init_std = config.init_std
        self.output_std = config.init_std / math.sqrt(2 * config.num_layers)
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = SwiGLU(config)
        self.dropout = nn.Dropout(config.dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights from the global generator and fill the rotary tables."""
        for norm in (self.attention_norm, self.mlp_norm):
            nn.init.ones_(norm.weight)
        attention, mlp = self.attention, self.mlp
        for linear in (attention.query, attention.key, attention.value, mlp.gate, mlp.up):
            nn.init.normal_(linear.weight, std=self.init_std)
        # 2 * num_layers branches add up on the residual stream: scaled so, their sum does not grow with the depth.
        for linear in (attention.projection, mlp.down):
            nn.init.normal_(linear.weight, std=self.output_std)
        attention.rotary.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``x`` (batch, time, dim); returns the same shape."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return x


class Head(nn.Module):
    """Last unit: final norm and the logits.

    Args:
        config: the model's shape.
        tied_to: the embedding whose matrix the head shares; ``None`` for a matrix of its own.
    """

    def __init__(self, config: GPTConfig, tied_to: TokenEmbedding | None = None) -> None:
        super().__init__()
        self.init_std = config.init_std
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        # A Parameter of the head itself: an nn.Linear's own reset_parameters() would overwrite a shared matrix.
        self.weight: Tensor = nn.Parameter(torch.empty(config.vocab_size, config.dim))
        # In a tuple, or the embedding would be registered as a submodule of the head.
        self._tied_to: tuple[TokenEmbedding, ...] = () if tied_to is None else (tied_to,)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights from the global generator; a shared matrix is taken from the embedding as it is now.

        ``to_empty`` gives every module parameters of its own and so breaks the tie: when it is used, the embedding's
        ``to_empty`` and ``reset_parameters`` come first, then the head's.
        """
        nn.init.ones_(self.norm.weight)
        if self._tied_to:
            self.tie_weights()
        else:
            nn.init.normal_(self.weight, std=self.init_std)

    def tie_weights(self) -> None:
        """Make the head's matrix the very Parameter of the embedding it is tied to, if it is tied to one."""
        for embedding in self._tied_to:
            self.weight = embedding.token.weight

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (batch, time, dim) to logits (batch, time, vocab_size)."""
        return F.linear(self.norm(x), self.weight)


class GPT(nn.Module):
    """A dense GPT, made of units that a pipeline may be cut between.

    Args:
        config: the model's shape.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = TokenEmbedding(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.head = Head(config, tied_to=self.embedding if config.tie_embeddings else None)

    def pipeline_layers(self) -> list[nn.Module]:
        """Return the units in their order: embedding, blocks, head. Each takes the tensor that the last one returned.

        Every unit has a ``reset_parameters()`` that initialises all of its parameters and buffers, also after
        ``to_empty``, from nothing but the global generator.
        """
        return [self.embedding, *self.blocks, self.head]

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict the token that follows each position.

        Args:
            tokens: token ids, (batch, time) int64; time at most ``config.context_length``.

        Returns:
            Logits, (batch, time, vocab_size), in the weights' dtype or autocast's.

        Raises:
            ValueError: ``time`` is above ``config.context_length``.
        """
        x = tokens
        for unit in self.pipeline_layers():
            x = unit(x)
        return x

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise all units in their order."""
        for unit in self.pipeline_layers():
            unit.reset_parameters()  # type: ignore[operator]
