"""Shape of a GPT, dense or with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

_PER_WEIGHT = 6.0
_PER_LOGIT = 10.0
"""Operations of the cross-entropy per logit: conversion, maximum, difference, exponential, sum and logarithm, and about
as many in the backward."""


@dataclass
class MoEConfig:
    """Choice of the blocks with experts, routing of tokens, and balancing of the experts' load.

    The formulas are in docs/guides/moe.md. The settings of Mixtral and GLM-4.5 are in research/notes/experts.md.
    """

    num_experts: int = 8
    """Number of experts of a layer, E."""
    top_k: int = 2
    """Number of experts to which each token is routed."""
    expert_dim: int | None = None
    """Inner width of an expert's SwiGLU, in features; null for mlp_dim, the width of the dense layers."""
    num_shared_experts: int = 0
    """Number of shared experts, which every token uses with weight 1. They are computed as one SwiGLU of
    num_shared_experts * expert_dim features."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """Function from the router's logits to scores: softmax over all experts (Mixtral), or a sigmoid of each logit
    (GLM-4.5, DeepSeek-V3). With sigmoids, a bias (see balance_bias_rate) is added to the scores for the choice."""
    normalize_top_k: bool = True
    """Divide the scores of the chosen experts by their sum before they weight the experts' outputs. With top_k
    1, set this to false, since the only weight would always be 1, and the router could not learn from the loss."""
    routed_scaling: float = 1.0
    """Factor on the sum of the chosen experts' weighted outputs; it does not apply to shared experts."""
    balance_loss: float = 0.01
    """Coefficient of the load-balancing loss; 0 for no such loss. The loss is E * sum over experts of (share of the
    choices) * (mean probability), averaged over the MoE layers; with even load it is 1."""
    balance_bias_rate: float = 0.0
    """Change of an expert's bias per update, with router sigmoid: the bias rises if the expert's load is below the
    mean, and falls if it is above. 0 keeps biases constant; DeepSeek-V3 uses 0.001."""
    num_dense_layers: int = 0
    """Number of blocks at the beginning that have a dense layer instead of experts."""
    every: int = 1
    """Size of the groups into which the blocks after num_dense_layers are divided. The last block of each group has
    experts, the others have a dense layer; 1 gives experts to all."""

    def is_moe_layer(self, layer: int) -> bool:
        """Return whether block ``layer``, counted from 0, has experts."""
        behind = layer - self.num_dense_layers
        return behind >= 0 and (behind + 1) % self.every == 0

    def problems(self, num_layers: int) -> list[str]:
        """Return the problems of these values in a model of ``num_layers`` blocks; each begins with ``moe.``."""
        wrong = {
            f"top_k={self.top_k}: must be from 1 to num_experts={self.num_experts}": (
                not 1 <= self.top_k <= self.num_experts
            ),
            f"router={self.router!r}: must be 'softmax' or 'sigmoid'": self.router not in ("softmax", "sigmoid"),
            f"balance_bias_rate={self.balance_bias_rate!r}: only the sigmoid router has a bias; set router: sigmoid, or"
            " set this to 0 and use balance_loss": self.router == "softmax" and self.balance_bias_rate != 0,
            f"every={self.every}: must be at least 1": self.every < 1,
            f"num_dense_layers={self.num_dense_layers}, every={self.every}: none of num_layers={num_layers} blocks has"
            " experts": self.every > 0 and not any(map(self.is_moe_layer, range(num_layers))),
        }
        return [f"moe.{problem}" for problem, found in wrong.items() if found]


@dataclass
class GPTConfig:
    """Shape and initialisation of a GPT; building a config raises if values do not fit together."""

    vocab_size: int = 256
    """Number of token ids: rows of the embedding and width of the logits."""
    context_length: int = 256
    """Maximum length of a sequence, in tokens."""
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
    """Base of the rotary position embedding, whose longest wavelength is nearly 2 pi * rope_base tokens."""
    norm_eps: float = 1e-5
    """Constant added to the mean square in RMSNorm."""
    dropout: float = 0.0
    """Probability of dropping an element of the embedding and of each residual branch."""
    tie_embeddings: bool = False
    """Share one matrix between embedding and head; in a pipeline the first and the last stage keep equal copies."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; output projections use init_std / sqrt(2 * num_layers)."""
    head_dim: int | None = None
    """Features per head, an even number; null for dim / num_heads."""
    qk_norm: bool = False
    """Normalise each head's query and key (RMSNorm over its features, before the rotation), as Qwen3 and GLM-4.5 do."""
    moe: MoEConfig | None = None
    """Settings of the experts that replace the SwiGLU of some blocks, or a mapping of them; null for a dense model."""

    def __post_init__(self) -> None:
        given: Any = self.moe
        if isinstance(given, Mapping):  # checkpoints hold a mapping
            self.moe = MoEConfig(**given)
        if problems := self._wrong_sizes() or self._mismatched():
            raise ValueError("GPTConfig cannot be built:\n" + "\n".join(f"  - {problem}" for problem in problems))

    @property
    def head_width(self) -> int:
        """Number of features per attention head, with the default filled in."""
        return self.dim // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def attention_width(self) -> int:
        """Number of features of all query heads of a block together."""
        return self.num_heads * self.head_width

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads per block, with the default filled in."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def mlp_width(self) -> int:
        """Inner width of the SwiGLU layer, with the default filled in."""
        if self.mlp_dim is not None:
            return self.mlp_dim
        return -(-8 * self.dim // (3 * 64)) * 64

    @property
    def expert_width(self) -> int:
        """Inner width of an expert, with the default filled in; in a dense model, ``mlp_width``."""
        if self.moe is None or self.moe.expert_dim is None:
            return self.mlp_width
        return self.moe.expert_dim

    @property
    def num_moe_layers(self) -> int:
        """Number of blocks with experts."""
        return sum(map(self.is_moe_layer, range(self.num_layers)))

    def is_moe_layer(self, layer: int) -> bool:
        """Return whether block ``layer``, counted from 0, has experts."""
        return self.moe is not None and self.moe.is_moe_layer(layer)

    def flops_per_token(self) -> float:
        """Return the floating-point operations of a forward and its backward per token, at full context length.

        Each weight takes two operations per token in the forward and four in the backward. Attention is counted as
        if it were not causal, as in Chowdhery et al., "PaLM" (2022). Looking up the embedding counts as 0.
        """
        return sum(map(self.block_flops, range(self.num_layers))) + _PER_WEIGHT * self.dim * self.vocab_size

    def block_flops(self, layer: int) -> float:
        """Return the FLOPs per token of block ``layer``, counted from 0; only the experts that a token uses count."""
        weights = 2 * self.dim * (self.num_heads + self.kv_heads) * self.head_width  # of attention's projections
        if self.moe is None or not self.moe.is_moe_layer(layer):
            weights += 3 * self.dim * self.mlp_width
        else:
            experts = self.moe.num_shared_experts + self.moe.top_k
            weights += self.moe.num_experts * self.dim + 3 * self.dim * experts * self.expert_width  # with the router
        return _PER_WEIGHT * weights + 12.0 * self.attention_width * self.context_length

    def unit_flops(self, recomputes_blocks: bool = False) -> list[float]:
        """Return the FLOPs per token of each layer (embedding, blocks, head), by which a pipeline balances stages.

        For the embedding only the addition of its gradient is counted; the head includes the loss. Norms,
        rotations, gates and residuals are left out: they are few operations, and every block has equally many.

        Args:
            recomputes_blocks: whether the backward recomputes each block's forward, which costs a third more.
        """
        times = 4 / 3 if recomputes_blocks else 1.0
        blocks = [times * self.block_flops(layer) for layer in range(self.num_layers)]
        return [float(self.dim), *blocks, (_PER_WEIGHT * self.dim + _PER_LOGIT) * self.vocab_size]

    def _wrong_sizes(self) -> list[str]:
        names = "vocab_size", "context_length", "num_layers", "dim", "num_heads", "num_kv_heads", "mlp_dim", "head_dim"
        sizes = {name: getattr(self, name) for name in names}
        return [f"{name}={size}: must be at least 1" for name, size in sizes.items() if size is not None and size < 1]

    def _mismatched(self) -> list[str]:
        wrong = {
            f"num_heads={self.num_heads}: must divide dim={self.dim}, or set head_dim": (
                self.head_dim is None and self.dim % self.num_heads > 0
            ),
            f"num_heads={self.num_heads}, head_dim={self.head_dim}: rotary embeddings need an even number of"
            f" features per head, not {self.head_width}": self.head_width % 2 > 0,
            f"num_kv_heads={self.kv_heads}: must divide num_heads={self.num_heads}": self.num_heads % self.kv_heads > 0,
        }
        problems = [problem for problem, found in wrong.items() if found]
        return problems + (self.moe.problems(self.num_layers) if self.moe is not None else [])
