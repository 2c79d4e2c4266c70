"""What the units of a GPT cost, in floating-point operations per token: how a pipeline balances its stages.

Matrix products are what counts: two operations per weight that a token is multiplied with forward, twice that backward.
Attention grows with the sequence; it counts without the half that causality saves, as in Chowdhery et al., "PaLM"
(2022). Norms, rotations, gates and residuals are left out: they are few operations, and as many in every block. The
loss is no unit, but runs where the head does.
"""

from __future__ import annotations

from lightning_asyncpp.models.config import GPTConfig

_PER_WEIGHT = 6.0
_PER_LOGIT = 10.0
"""Of the cross-entropy: conversion, maximum, difference, exponential, sum and logarithm; backward about as much."""


def embedding_flops(config: GPTConfig) -> float:
    """Of the embedding: reading a row multiplies nothing, its gradient is added once."""
    return float(config.dim)


def attention_flops(config: GPTConfig) -> float:
    """Of a block's attention at the full ``context_length``: its four projections, the scores and the mixing."""
    return _PER_WEIGHT * config.attention_weights() + 12.0 * config.attention_width * config.context_length


def mlp_flops(config: GPTConfig, layer: int) -> float:
    """Of the feed-forward part of block ``layer``, 0 first: all of it, or the router and a token's experts."""
    return _PER_WEIGHT * config.mlp_weights(layer, all_experts=False)


def block_flops(config: GPTConfig, layer: int) -> float:
    """Of block ``layer``, 0 first."""
    return attention_flops(config) + mlp_flops(config, layer)


def head_flops(config: GPTConfig) -> float:
    """Of the logits."""
    return _PER_WEIGHT * config.dim * config.vocab_size


def loss_flops(config: GPTConfig) -> float:
    """Of the cross-entropy of the logits."""
    return _PER_LOGIT * config.vocab_size


def unit_flops(config: GPTConfig, recomputes_blocks: bool = False) -> list[float]:
    """Of every unit of the model: embedding, blocks, head with the loss.

    Args:
        config: the model's shape.
        recomputes_blocks: whether backwards run the forwards of blocks once more, a third of what they cost otherwise.
    """
    times = 4 / 3 if recomputes_blocks else 1.0
    blocks = [times * block_flops(config, layer) for layer in range(config.num_layers)]
    return [embedding_flops(config), *blocks, head_flops(config) + loss_flops(config)]
