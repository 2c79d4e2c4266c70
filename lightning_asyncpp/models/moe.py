"""The mixture-of-experts layer: a router, its experts, and what every token goes through beside them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from lightning_asyncpp.models.config import GPTConfig
from lightning_asyncpp.models.experts import Experts
from lightning_asyncpp.models.layers import SwiGLU
from lightning_asyncpp.models.router import Routing, balance_loss, count, make_router, z_loss


class MoEOutput(NamedTuple):
    """What a layer computes; whoever runs it says the last two to whoever runs the model (``auxiliary``).

    Attributes:
        output: the shape of the input.
        loss: the layer's part of the auxiliary losses, with their coefficients, without dimensions.
        counts: (E + 3,) fp64, see :class:`~lightning_asyncpp.models.router.Router`.
    """

    output: Tensor
    loss: Tensor
    counts: Tensor


class MoE(nn.Module):
    """Takes the place of a block's SwiGLU. It is a pure function: it may be computed a second time for its backward.

    Args:
        config: the model's shape, with experts.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        assert config.moe is not None
        # A mean over the layers, so that a coefficient means the same in a deep and in a shallow model.
        self.balance_coefficient = config.moe.balance_loss / config.num_moe_layers
        self.z_coefficient = config.moe.z_loss / config.num_moe_layers
        self.router = make_router(config)
        self.experts = Experts(config)
        self.shared: SwiGLU | None = None
        if config.moe.num_shared_experts:
            self.shared = SwiGLU(config.dim, config.moe.num_shared_experts * config.expert_width)

    def initialize(self, std: float, output_std: float) -> None:
        """Draw the weights from the global generator, normal with these standard deviations."""
        self.router.initialize(std)
        self.experts.initialize(std, output_std)
        if self.shared is not None:
            self.shared.initialize(std, output_std)

    def forward(self, x: Tensor, grouped: bool) -> MoEOutput:
        """Map ``x`` (batch, time, dim) position by position.

        Args:
            x: the tokens.
            grouped: see :meth:`~lightning_asyncpp.models.experts.Experts.use_grouped`.
        """
        tokens = x.flatten(0, -2)  # (T, dim)
        routing = self.router(tokens)
        mixed, counts = self.experts(tokens, routing.experts, routing.weights, grouped)
        output = mixed.view(x.shape)
        if self.shared is not None:
            output = output + self.shared(x)
        return MoEOutput(output, self._loss(routing, counts), count(routing, counts))

    def _loss(self, routing: Routing, counts: Tensor) -> Tensor:
        loss = routing.logits.new_zeros(())
        if self.balance_coefficient:
            loss = loss + self.balance_coefficient * balance_loss(routing, counts)
        if self.z_coefficient:
            loss = loss + self.z_coefficient * z_loss(routing)
        return loss
