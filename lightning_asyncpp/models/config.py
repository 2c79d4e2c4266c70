"""The shape of a GPT, dense or with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

_PER_WEIGHT = 6.0
_PER_LOGIT = 10.0
"""Of the cross-entropy: conversion, maximum, difference, exponential, sum and logarithm; backward about as much."""


@dataclass
class MoEConfig:
    """Blocks with experts, the routing of tokens, and the balancing of the experts' load.

    The formulas: docs/guides/moe.md; which settings are those of Mixtral and of GLM-4.5: research/notes/experts.md.
    """

    num_experts: int = 8
    """Number of experts of a layer, E."""
    top_k: int = 2
    """Number of experts that each token goes to."""
    expert_dim: int | None = None
    """Inner width of an expert's SwiGLU, in features; null for that of the dense layers (mlp_dim)."""
    num_shared_experts: int = 0
    """Experts that every token goes to, unweighted; they are one SwiGLU of num_shared_experts * expert_dim features."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """What makes scores of the router's logits: softmax over all experts (Mixtral), or a sigmoid of each (GLM-4.5,
    DeepSeek-V3), to which a bias may be added for the choice."""
    normalize_top_k: bool = True
    """Divide the scores of the chosen experts by their sum before they weight the experts' outputs; not with top_k 1,
    where the weight would be 1 whatever the router says, and the loss would teach it nothing."""
    routed_scaling: float = 1.0
    """Factor on the sum of the chosen experts' weighted outputs; shared experts are outside of it."""
    balance_loss: float = 0.01
    """Coefficient of the load-balancing loss, E * sum over experts of (share of the choices) * (mean probability),
    which is 1 with even load; a mean over the MoE layers. 0: none."""
    balance_bias_rate: float = 0.0
    """What the bias of an expert changes by per update, upwards with less than the mean load and downwards with more;
    router sigmoid. 0: the biases stay; DeepSeek-V3 has 0.001."""
    num_dense_layers: int = 0
    """Number of blocks at the beginning that have a dense layer instead."""
    every: int = 1
    """Behind these, the last one of each group of so many blocks has experts; 1: all of them."""

    def is_moe_layer(self, layer: int) -> bool:
        """Whether block ``layer``, 0 first, has experts."""
        behind = layer - self.num_dense_layers
        return behind >= 0 and (behind + 1) % self.every == 0

    def problems(self, num_layers: int) -> list[str]:
        """What is wrong in a model of so many blocks, with the mend; names begin with ``moe.``."""
        wrong = {
            f"top_k={self.top_k}: must be from 1 to num_experts={self.num_experts}": (
                not 1 <= self.top_k <= self.num_experts
            ),
            f"router={self.router!r}: must be 'softmax' or 'sigmoid'": self.router not in ("softmax", "sigmoid"),
            f"balance_bias_rate={self.balance_bias_rate!r}: only scores of the sigmoid router take a bias; set router:"
            " sigmoid, or leave it at 0 and use balance_loss": self.router == "softmax" and self.balance_bias_rate != 0,
            f"num_dense_layers={self.num_dense_layers}, every={self.every}: none of num_layers={num_layers} blocks has"
            " experts": not any(map(self.is_moe_layer, range(num_layers))),
        }
        return [f"moe.{problem}" for problem, found in wrong.items() if found]


@dataclass
class GPTConfig:
    """The shape and the initialisation of a GPT; what does not fit together is reported when the config is built."""

    vocab_size: int = 256
    """Number of token ids that the model knows: the rows of the embedding and the width of the logits."""
    context_length: int = 256
    """Longest sequence that the model takes, in tokens."""
    num_layers: int = 6
    """Number of transformer blocks."""
    dim: int = 384
    """Width of the residual stream, in features."""
    num_heads: int = 6
    """Number of query heads per block."""
    num_kv_heads: int | None = None
    """Number of key and value heads per block (grouped-query attention); null for as many as num_heads."""
    mlp_dim: int | None = None
    """Inner width of the SwiGLU layer, in features; null for 8/3 * dim rounded up to a multiple of 64."""
    rope_base: float = 10_000.0
    """Base of the rotary position embedding: its longest wavelength is 2 pi * rope_base tokens."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    dropout: float = 0.0
    """Probability of dropping an element of the embedding and of each residual branch."""
    tie_embeddings: bool = False
    """Share one matrix between the embedding and the head; in a pipeline both ends have a copy, which stay equal."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; output projections use init_std / sqrt(2 * num_layers)."""
    head_dim: int | None = None
    """Features per head, an even number; null for dim / num_heads."""
    qk_norm: bool = False
    """Normalise each head's query and key (RMSNorm over its features, before the rotation), as Qwen3 and GLM-4.5 do."""
    moe: MoEConfig | None = None
    """Experts instead of the SwiGLU of some blocks; null for a dense model. A mapping of its fields will do."""

    def __post_init__(self) -> None:
        given: Any = self.moe
        if isinstance(given, Mapping):  # a checkpoint gives back the mapping that was saved
            self.moe = MoEConfig(**given)
        if problems := self._wrong_sizes() or self._mismatched():
            raise ValueError("GPTConfig cannot be built:\n" + "\n".join(f"  - {problem}" for problem in problems))

    @property
    def head_width(self) -> int:
        """Features per attention head, with the default filled in."""
        return self.dim // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def attention_width(self) -> int:
        """Features of all query heads of a block together."""
        return self.num_heads * self.head_width

    @property
    def kv_heads(self) -> int:
        """Key and value heads per block, with the default filled in."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def mlp_width(self) -> int:
        """Inner width of the SwiGLU layer, with the default filled in."""
        if self.mlp_dim is not None:
            return self.mlp_dim
        return -(-8 * self.dim // (3 * 64)) * 64

    @property
    def expert_width(self) -> int:
        """Inner width of an expert, with the default filled in; that of the dense layers in a dense model."""
        if self.moe is None or self.moe.expert_dim is None:
            return self.mlp_width
        return self.moe.expert_dim

    @property
    def num_moe_layers(self) -> int:
        """Number of blocks with experts."""
        return sum(map(self.is_moe_layer, range(self.num_layers)))

    def is_moe_layer(self, layer: int) -> bool:
        """Whether block ``layer``, 0 first, has experts."""
        return self.moe is not None and self.moe.is_moe_layer(layer)

    def num_parameters(self) -> int:
        """Number of trainable values of the whole model; a shared matrix counts once."""
        vectors = 2 * self.dim + (2 * self.head_width if self.qk_norm else 0)
        matrices = 1 if self.tie_embeddings else 2
        blocks = sum(
            self.attention_weights() + self.mlp_weights(layer, all_experts=True) + vectors
            for layer in range(self.num_layers)
        )
        return matrices * self.vocab_size * self.dim + blocks + self.dim

    def num_active_parameters(self) -> int:
        """Number of trainable values that one token meets: all but the experts that it does not go to."""
        if self.moe is None:
            return self.num_parameters()
        unused = (self.moe.num_experts - self.moe.top_k) * 3 * self.dim * self.expert_width
        return self.num_parameters() - self.num_moe_layers * unused

    def flops_per_token(self) -> float:
        """Floating-point operations of a forward and its backward per token of a sequence of ``context_length``.

        Two per weight that the token is multiplied with forward, twice that backward; attention counts without the half
        that causality saves, as in Chowdhery et al., "PaLM" (2022). Reading the embedding multiplies nothing.
        """
        return sum(map(self.block_flops, range(self.num_layers))) + _PER_WEIGHT * self.dim * self.vocab_size

    def block_flops(self, layer: int) -> float:
        """The same of block ``layer``, 0 first; of its experts those that a token goes to."""
        weights = self.attention_weights() + self.mlp_weights(layer, all_experts=False)
        return _PER_WEIGHT * weights + 12.0 * self.attention_width * self.context_length

    def unit_flops(self, recomputes_blocks: bool = False) -> list[float]:
        """The same of every unit of the model, by which a pipeline balances its stages: embedding, blocks, head.

        The gradient of an embedding is added once; the loss is no unit, but runs where the head does. Norms, rotations,
        gates and residuals are left out: they are few operations, and as many in every block.

        Args:
            recomputes_blocks: whether backwards run the forwards of blocks once more, a third of what they cost
                otherwise.
        """
        times = 4 / 3 if recomputes_blocks else 1.0
        blocks = [times * self.block_flops(layer) for layer in range(self.num_layers)]
        return [float(self.dim), *blocks, (_PER_WEIGHT * self.dim + _PER_LOGIT) * self.vocab_size]

    def attention_weights(self) -> int:
        """Number of weights of a block's four projections."""
        return 2 * self.dim * (self.num_heads + self.kv_heads) * self.head_width

    def mlp_weights(self, layer: int, all_experts: bool) -> int:
        """Weights of a block's dense or MoE layer, of all experts or of those that a token goes to."""
        if self.moe is None or not self.moe.is_moe_layer(layer):
            return 3 * self.dim * self.mlp_width
        experts = self.moe.num_shared_experts + (self.moe.num_experts if all_experts else self.moe.top_k)
        return self.moe.num_experts * self.dim + experts * 3 * self.dim * self.expert_width

    def _wrong_sizes(self) -> list[str]:
        names = (
            "vocab_size",
            "context_length",
            "num_layers",
            "dim",
            "num_heads",
            "num_kv_heads",
            "mlp_dim",
            "head_dim",
        )
        sizes = {name: getattr(self, name) for name in names}
        return [f"{name}={size}: must be at least 1" for name, size in sizes.items() if size is not None and size < 1]

    def _mismatched(self) -> list[str]:
        wrong = {
            f"num_heads={self.num_heads}: must divide dim={self.dim}, or set head_dim": (
                self.head_dim is None and self.dim % self.num_heads > 0
            ),
            f"num_heads={self.num_heads}, head_dim={self.head_dim}: rotary embeddings turn pairs of features of"
            f" a head, and {self.head_width} is odd": self.head_width % 2 > 0,
            f"num_kv_heads={self.kv_heads}: must divide num_heads={self.num_heads}": self.num_heads % self.kv_heads > 0,
        }
        problems = [problem for problem, found in wrong.items() if found]
        return problems + (self.moe.problems(self.num_layers) if self.moe is not None else [])
