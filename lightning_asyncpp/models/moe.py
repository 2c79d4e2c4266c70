"""The mixture-of-experts layer: a router, its experts, and what every token goes through beside them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_asyncpp.models.config import GPTConfig
from lightning_asyncpp.models.execution import has_autocast
from lightning_asyncpp.models.grouped_linear import grouped_linear, serves_grouped
from lightning_asyncpp.models.layers import SwiGLU
from lightning_asyncpp.models.router import Routing, balance_loss, count, make_router, z_loss


class Experts(nn.Module):
    """SwiGLU layers of equal shape, each for the tokens that were routed to it.

    Args:
        config: the model's shape, with experts.

    Attributes:
        gate, up: (E, width, dim); one after the other they are the weights of E ``nn.Linear``.
        down: (E, dim, width).
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        assert config.moe is not None
        shape = config.moe.num_experts, config.expert_width, config.dim
        self.gate = nn.Parameter(torch.empty(shape))
        self.up = nn.Parameter(torch.empty(shape))
        self.down = nn.Parameter(torch.empty(shape[0], config.dim, config.expert_width))

    def initialize(self, std: float, output_std: float) -> None:
        """Draw the weights from the global generator, normal with these standard deviations."""
        nn.init.normal_(self.gate, std=std)
        nn.init.normal_(self.up, std=std)
        nn.init.normal_(self.down, std=output_std)

    def use_grouped(self, device: torch.device) -> bool:
        """Whether the products run as torch's grouped matmul or by a loop over the experts."""
        _, width, dim = self.gate.shape
        dtype = self._dtype(device)
        return serves_grouped(device, dtype, dim, width) and serves_grouped(device, dtype, width, dim)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor, grouped: bool) -> tuple[Tensor, Tensor]:
        """Apply each token's experts to it.

        Args:
            x: (T, dim), the tokens.
            experts: (T, k) int64, where each goes.
            weights: (T, k), fp32; the outputs are summed with them in their dtype.
            grouped: see :meth:`use_grouped`.

        Returns:
            The sum for each token, (T, dim), and the number of tokens that each expert got, (E,) int32.
        """
        dtype = self._dtype(x.device)
        x, gate, up, down = (tensor.to(dtype) for tensor in (x, self.gate, self.up, self.down))
        order, back, ends = sort_by_expert(experts, len(self.gate))
        rows = _Copy.apply(x, order, back, experts.shape[1])  # (T * k, dim), those of an expert next to each other
        inner = F.silu(grouped_linear(rows, gate, ends, grouped)) * grouped_linear(rows, up, ends, grouped)
        outputs = _Permute.apply(grouped_linear(inner, down, ends, grouped), back, order)  # (T * k, dim)
        mixed = (outputs.view(*experts.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)  # (T, dim), in fp32
        return mixed.to(dtype), ends.diff(prepend=ends.new_zeros(1))

    def _dtype(self, device: torch.device) -> torch.dtype:
        # torch's grouped matmul is none of the operations that autocast knows.
        if has_autocast(device.type) and torch.is_autocast_enabled(device.type):
            return torch.get_autocast_dtype(device.type)
        return self.gate.dtype


def sort_by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Put the choices of T tokens into the order of the experts, those of one expert in the order of the tokens.

    Nothing is read on the host, and no two results depend on which of several threads was first.

    Args:
        experts: (T, k) int64; choice c is that of token c // k.
        num_experts: E.

    Returns:
        The choices in the new order, (T * k,) int64; where each choice is there, the inverse permutation; and where
        each expert's choices end, (E,) int32.
    """
    flat = experts.flatten()
    in_order, order = flat.sort(stable=True)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    numbers = torch.arange(num_experts, device=order.device)
    return order, back, torch.searchsorted(in_order, numbers, right=True, out_int32=True)


class _Permute(torch.autograd.Function):
    """``rows[order]``, where ``back`` is the inverse of ``order``: its gradient is read, not added up in any order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return grad[back], None, None


class _Copy(torch.autograd.Function):
    """The same of so many copies of each row, where choice c is of row c // copies; their gradients are summed."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.copies = copies
        return rows[order // copies]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        return grad[back].unflatten(0, (-1, ctx.copies)).sum(dim=1), None, None, None


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
            grouped: see :meth:`~lightning_asyncpp.models.moe.Experts.use_grouped`.
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
