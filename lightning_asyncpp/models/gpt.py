"""GPT with RMSNorm, rotary positions, grouped-query attention, and SwiGLU or experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_asyncpp.auxiliary import add_auxiliary_loss, add_statistics
from lightning_asyncpp.errors import check_choice
from lightning_asyncpp.models.config import GPTConfig
from lightning_asyncpp.models.layers import Attention, SwiGLU
from lightning_asyncpp.models.moe import MoE, MoEOutput

ActivationCheckpointing = Literal["none", "block", "selective"]

_EXPENSIVE = (
    *("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._grouped_mm", "lightning_asyncpp.loop_linear"),
    *("aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_flash_attention_for_cpu"),
    *("aten._scaled_dot_product_efficient_attention", "aten._scaled_dot_product_cudnn_attention"),
    *("aten._scaled_dot_product_attention_math", "aten._scaled_dot_product_fused_attention_overrideable"),
)
"""Operators whose results selective checkpointing keeps; some releases of torch lack some of them."""


class Execution:
    """Settings of a GPT's blocks that change results by rounding at most: activation checkpointing and compilation.

    Args:
        activation_checkpointing: ``"none"`` keeps all activations for the backward; ``"block"`` keeps the input of each
            block and recomputes the block in the backward; ``"selective"`` keeps the results of matrix products and of
            attention as well, and recomputes the rest.
        compile_blocks: whether to compile each block with ``torch.compile``, or a mapping of arguments for it.

    Raises:
        ConfigurationError: ``activation_checkpointing`` is none of the three.
    """

    def __init__(
        self,
        activation_checkpointing: ActivationCheckpointing = "none",
        compile_blocks: bool | Mapping[str, Any] = False,
    ) -> None:
        check_choice("activation_checkpointing", activation_checkpointing, ActivationCheckpointing)
        self.activation_checkpointing = activation_checkpointing
        self.compile_options = dict(compile_blocks) if isinstance(compile_blocks, Mapping) else {}
        self.compiles = isinstance(compile_blocks, Mapping) or compile_blocks

    def run(self, function: Callable[..., Any], *args: Any, random: bool) -> Any:
        """Call a function with these settings; it must have no side effects.

        Args:
            function: function to call.
            args: its arguments.
            random: whether the function draws random numbers.
        """
        how = self.activation_checkpointing if torch.is_grad_enabled() else "none"
        if self.compiles:
            return _compiled(function, how, random, self.compile_options)(*args)
        return _checkpointed(function, how, random)(*args)


class Block(nn.Module):
    """Attention and feed-forward layer, each with a norm before it and added to the residual stream.

    Args:
        config: shape of the model.
        layer: number of the block, from 0; the config decides by it whether the block has experts.
        execution: settings of the computation; ``None`` for no checkpointing and no compilation.

    Attributes:
        mlp: a :class:`SwiGLU` or a :class:`MoE`.
    """

    def __init__(self, config: GPTConfig, layer: int = 0, execution: Execution | None = None) -> None:
        super().__init__()
        self.init_std = config.init_std
        self.output_std = config.init_std / math.sqrt(2 * config.num_layers)
        self.execution = execution or Execution()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = MoE(config) if config.is_moe_layer(layer) else SwiGLU(config.dim, config.mlp_width)
        self.dropout = nn.Dropout(config.dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights from the global generator, fill the rotary tables, and set balance biases to 0."""
        attention, mlp = self.attention, self.mlp
        for norm in (self.attention_norm, self.mlp_norm, attention.query_norm, attention.key_norm):
            if isinstance(norm, nn.RMSNorm):
                nn.init.ones_(norm.weight)
        linears, outputs = [attention.query, attention.key, attention.value], [attention.projection]
        if isinstance(mlp, SwiGLU):
            linears += [mlp.gate, mlp.up]
            outputs += [mlp.down]
        for linear in linears:
            nn.init.normal_(linear.weight, std=self.init_std)
        # 2 * num_layers branches add up on the residual stream; with this scale their sum does not grow with the depth.
        for linear in outputs:
            nn.init.normal_(linear.weight, std=self.output_std)
        attention.rotary.reset_parameters()
        if isinstance(mlp, MoE):
            mlp.initialize(self.init_std, self.output_std)

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``x`` (batch, time, dim); return the same shape.

        In training, this method reports the experts' auxiliary losses and statistics, which the caller of the model
        collects (:mod:`lightning_asyncpp.auxiliary`). It does so after the compiled or recomputed code, which must have
        no side effects.
        """
        random = self.training and self.dropout.p > 0
        if isinstance(self.mlp, SwiGLU):
            transformed: Tensor = self.execution.run(_dense, self, x, random=random)
            return transformed
        grouped = self.mlp.experts.use_grouped(x.device)
        output: MoEOutput = self.execution.run(_sparse, self, x, grouped, random=random)
        if self.training:
            add_auxiliary_loss(output.loss)
            add_statistics(self.mlp.router, output.counts)
        return output.output


def _dense(block: Block, x: Tensor) -> Tensor:
    x = _attend(block, x)
    transformed: Tensor = x + block.dropout(block.mlp(block.mlp_norm(x)))
    return transformed


def _sparse(block: Block, x: Tensor, grouped: bool) -> MoEOutput:
    x = _attend(block, x)
    mapped, loss, counts = block.mlp(block.mlp_norm(x), grouped)
    return MoEOutput(x + block.dropout(mapped), loss, counts)


def _attend(block: Block, x: Tensor) -> Tensor:
    attended: Tensor = x + block.dropout(block.attention(block.attention_norm(x)))
    return attended


class TokenEmbedding(nn.Module):
    """First layer, from token ids to vectors; it refuses sequences that are too long for the layers after it."""

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
        """Look up ``tokens`` (batch, time) int64; return (batch, time, dim).

        Raises:
            ValueError: ``time`` is above the model's ``context_length``.
        """
        # Check here, since a pipeline calls the layers and never the model's own forward.
        if tokens.shape[-1] > self.context_length:
            raise ValueError(
                f"sequences of {tokens.shape[-1]} tokens do not fit context_length={self.context_length}; "
                "shorten them or build the model with a longer context"
            )
        embedded: Tensor = self.dropout(self.token(tokens))
        return embedded


class Head(nn.Module):
    """Last layer: final norm and logits.

    Args:
        config: shape of the model.
        tied_to: embedding whose matrix the head shares; ``None`` for a separate matrix.
    """

    def __init__(self, config: GPTConfig, tied_to: TokenEmbedding | None = None) -> None:
        super().__init__()
        self.init_std = config.init_std
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        # Use a Parameter and not an nn.Linear, whose reset_parameters() would overwrite a shared matrix.
        self.weight: Tensor = nn.Parameter(torch.empty(config.vocab_size, config.dim))
        # Keep the embedding in a tuple, since otherwise it would be registered as a submodule of the head.
        self._tied_to: tuple[TokenEmbedding, ...] = () if tied_to is None else (tied_to,)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights from the global generator, or take a shared matrix from the embedding.

        ``to_empty`` gives every module its own parameters and so breaks the tie. After ``to_empty``, call the
        embedding's ``reset_parameters`` before the head's.
        """
        nn.init.ones_(self.norm.weight)
        if self._tied_to:
            self.tie_weights()
        else:
            nn.init.normal_(self.weight, std=self.init_std)

    def tie_weights(self) -> None:
        """Set the head's matrix to the Parameter of the embedding that it is tied to, if any."""
        for embedding in self._tied_to:
            self.weight = embedding.token.weight

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (batch, time, dim) to logits (batch, time, vocab_size)."""
        return F.linear(self.norm(x), self.weight)


class GPT(nn.Module):
    """GPT that a pipeline can cut between any two layers.

    Args:
        config: shape of the model.
        activation_checkpointing: ``"none"``, ``"block"`` or ``"selective"``, see :class:`Execution`.
        compile_blocks: whether to compile each block with ``torch.compile``, or a mapping of arguments for it.

    Raises:
        ConfigurationError: ``activation_checkpointing`` is none of the three.
    """

    def __init__(
        self,
        config: GPTConfig,
        activation_checkpointing: ActivationCheckpointing = "none",
        compile_blocks: bool | Mapping[str, Any] = False,
    ) -> None:
        super().__init__()
        self.config = config
        execution = Execution(activation_checkpointing, compile_blocks)
        self._recomputes_blocks = execution.activation_checkpointing == "block"
        self.embedding = TokenEmbedding(config)
        self.blocks = nn.ModuleList(Block(config, layer, execution) for layer in range(config.num_layers))
        self.head = Head(config, tied_to=self.embedding if config.tie_embeddings else None)

    def pipeline_layers(self) -> list[nn.Module]:
        """Return the layers in order: embedding, blocks, head. Each takes the result of the layer before it.

        Every layer has a ``reset_parameters()`` that initialises all of its parameters and buffers, also after
        ``to_empty``, from the global generator alone.
        """
        return [self.embedding, *self.blocks, self.head]

    pipeline_costs_unit = "FLOPs/token"
    """Unit of :meth:`pipeline_costs`, for the table of stages."""

    def pipeline_costs(self) -> list[float]:
        """Return the cost of each layer in floating-point operations per token, by which a pipeline balances stages."""
        return self.config.unit_flops(self._recomputes_blocks)

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


def _checkpointed(function: Callable[..., Any], how: str, random: bool) -> Callable[..., Any]:
    if how == "none":
        return function
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": random}
    if how == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)

    def run(*args: Any) -> Any:
        return checkpoint(function, *args, **options)

    return run


_known: dict[tuple, Callable[..., Any]] = {}


def _compiled(function: Callable[..., Any], how: str, random: bool, options: dict[str, Any]) -> Callable[..., Any]:
    """Return the compiled function; all blocks and models share it, since their weights are among its inputs.

    It is kept here and not as an attribute of a model, since models may be copied or pickled.
    """
    key = function, how, random and how != "none", repr(sorted(options.items()))
    if key not in _known:
        _known[key] = torch.compile(_checkpointed(function, how, random), **options)
    return _known[key]


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = str(getattr(operator, "overloadpacket", operator))
    return CheckpointPolicy.MUST_SAVE if name in _EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE
