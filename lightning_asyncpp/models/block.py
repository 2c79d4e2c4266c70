"""The middle unit of a GPT: attention, and a dense or a mixture-of-experts layer."""

from __future__ import annotations

import math

from torch import Tensor, nn

from lightning_asyncpp.auxiliary import add_auxiliary_loss, add_statistics
from lightning_asyncpp.models.config import GPTConfig
from lightning_asyncpp.models.execution import Execution
from lightning_asyncpp.models.layers import Attention, SwiGLU
from lightning_asyncpp.models.moe import MoE, MoEOutput


class Block(nn.Module):
    """Attention and feed-forward, each normalised before and added to the residual stream.

    Args:
        config: the model's shape.
        layer: which block it is, 0 first: the config says whether it has experts.
        execution: how it is computed; default: plainly.

    Attributes:
        mlp: a :class:`SwiGLU`, or a :class:`MoE`.
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
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        # 2 * num_layers branches add up on the residual stream: scaled so, their sum does not grow with the depth.
        for linear in outputs:
            nn.init.normal_(linear.weight, std=self.output_std)
        attention.rotary.reset_parameters()
        if isinstance(mlp, MoE):
            mlp.initialize(self.init_std, self.output_std)

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``x`` (batch, time, dim); returns the same shape.

        In training, experts have auxiliary losses and counts, which they say here, outside of what is compiled or
        computed a second time: whoever runs the model collects them (:mod:`lightning_asyncpp.auxiliary`).
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
