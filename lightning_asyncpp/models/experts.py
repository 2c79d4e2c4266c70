"""The experts of a layer, stacked: every token goes to all that it chose, and none is dropped."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_asyncpp.models.autocast import has_autocast
from lightning_asyncpp.models.config import GPTConfig
from lightning_asyncpp.models.grouped_linear import grouped_linear, serves_grouped


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
