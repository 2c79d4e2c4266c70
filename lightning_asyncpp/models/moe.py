"""The mixture-of-experts layer: a router, its experts, what every token goes through beside them, and their balance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_asyncpp.auxiliary import StatisticsLayer
from lightning_asyncpp.models.config import GPTConfig, MoEConfig
from lightning_asyncpp.models.grouped_linear import grouped_linear, serves_grouped
from lightning_asyncpp.models.layers import SwiGLU


def _has_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type)


has_autocast: Callable[[str], bool] = torch.compiler.assume_constant_result(_has_autocast)
"""Whether ``torch.autocast`` knows a type of device; it does not know "meta". The compiler of torch 2.11 cannot look
into torch's own function."""


class Routing(NamedTuple):
    """What a router says of T tokens, E experts and k choices; all floating-point tensors are fp32.

    Attributes:
        experts: (T, k) int64, the experts of each token, the one with the highest score first.
        weights: (T, k), what their outputs are multiplied with.
        probabilities: (T, E), the scores of a token divided by their sum.
    """

    experts: Tensor
    weights: Tensor
    probabilities: Tensor


class Router(StatisticsLayer):
    """Scores the experts for each token and chooses ``top_k`` of them.

    With router "softmax" the scores are the softmax over all experts, as in Mixtral (arXiv 2401.04088) and Switch
    (arXiv 2101.03961). With "sigmoid" they are sigmoids, and a bias that learns from the loads takes part in the choice
    alone, as in DeepSeek-V3 (arXiv 2412.19437) and GLM-4.5; the bias and its update are those of Wang et al.,
    "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts" (arXiv 2408.15664, Algorithm 1).

    The arithmetic is in fp32, whatever the tokens, the weight or autocast are in: in bf16 two scores are often equal.

    Args:
        config: the model's shape, with experts.

    Attributes:
        weight: (E, dim).
        balance_bias: (E,) fp32, also when the module is converted to another dtype: steps of 0.001 vanish in bf16; None
            with router "softmax".
        num_statistics: E + 3: how many tokens went to each expert, the number of tokens, of choices (k per token), and
            the sum of the entropies of the tokens' probabilities, in nats.
    """

    metrics: ClassVar[Mapping[str, Literal["mean", "max", "min", "sum"]]] = {
        "moe_load_max": "max",
        "moe_load_min": "min",
        "moe_entropy": "mean",
        "moe_dropped": "sum",
    }
    balance_bias: Tensor | None

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        assert config.moe is not None
        self.moe: MoEConfig = config.moe
        self.num_statistics = self.moe.num_experts + 3
        self.weight = nn.Parameter(torch.empty(self.moe.num_experts, config.dim))
        has_bias = self.moe.router == "sigmoid"
        self.register_buffer("balance_bias", torch.empty(self.moe.num_experts) if has_bias else None)
        self.versioned_buffers = ("balance_bias",) if has_bias else ()

    def initialize(self, std: float) -> None:
        """Draw the weight from the global generator, normal with this standard deviation; no expert is preferred."""
        nn.init.normal_(self.weight, std=std)
        if self.balance_bias is not None:
            nn.init.zeros_(self.balance_bias)

    def forward(self, x: Tensor) -> Routing:
        """Route the tokens ``x`` (T, dim)."""
        logits = self._logits(x)
        if self.balance_bias is None:
            scores = probabilities = logits.softmax(dim=-1)  # (T, E)
            preferences = scores.detach()
        else:
            scores = logits.sigmoid()
            probabilities = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
            preferences = scores.detach() + self.balance_bias
        experts = preferences.topk(self.moe.top_k, dim=-1).indices  # (T, k)
        weights = scores.gather(-1, experts)  # (T, k)
        if self.moe.normalize_top_k:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)  # GLM-4.5's term: sigmoids may all vanish
        return Routing(experts, weights * self.moe.routed_scaling, probabilities)

    def _logits(self, x: Tensor) -> Tensor:
        device = x.device.type
        no_autocast = torch.autocast(device, enabled=False) if has_autocast(device) else nullcontext()
        dtype = torch.promote_types(x.dtype, torch.float32)
        with no_autocast:
            return F.linear(x.to(dtype), self.weight.to(dtype))  # (T, E)

    @torch.no_grad()
    def update_from_statistics(self, totals: Tensor) -> None:
        """Move each expert's bias by ``balance_bias_rate`` towards the mean load.

        Args:
            totals: (E + 3,), see above.
        """
        if self.balance_bias is None or not self.moe.balance_bias_rate:
            return
        counts = totals[:-3]
        direction = torch.sign(counts.mean() - counts).to(self.balance_bias, non_blocking=True)
        self.balance_bias.add_(direction, alpha=self.moe.balance_bias_rate)

    @classmethod
    def compute_metrics(cls, totals: Tensor) -> dict[str, float]:
        """Largest and smallest load of an expert over the mean one, mean entropy in nats, and choices left undone."""
        counts, (tokens, choices, entropy) = totals[:-3], totals[-3:].tolist()
        mean = float(counts.mean()) or 1.0  # of no token at all: loads of 0
        return {
            "moe_load_max": float(counts.max()) / mean,
            "moe_load_min": float(counts.min()) / mean,
            "moe_entropy": entropy / max(tokens, 1.0),
            "moe_dropped": choices - float(counts.sum()),
        }

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> Router:
        # `module.to(torch.bfloat16)` rounds every floating-point buffer; this one is put back as it was.
        before = self.balance_bias
        super()._apply(fn, recurse)
        if before is not None and self.balance_bias is not None and self.balance_bias.dtype != torch.float32:
            self.balance_bias = before.to(self.balance_bias.device, torch.float32)
        return self


def balance_loss(routing: Routing, counts: Tensor) -> Tensor:
    """E * sum over experts of f * P; 1 with even loads, up to E where all tokens go to the same expert.

    f is the share of the T * k choices that fell on the expert, P its mean probability. With one choice per token it is
    the loss of Switch (arXiv 2101.03961, equation 4) without its coefficient; with k choices f sums to 1 as well, as in
    DeepSeek-V3 (arXiv 2412.19437, equations 17 to 20), so that the least value does not depend on k.

    Args:
        routing: of T tokens.
        counts: (E,), how many tokens went to each expert.
    """
    shares = counts / routing.experts.numel()  # (E,), f
    return len(counts) * torch.dot(shares.to(routing.probabilities.dtype), routing.probabilities.mean(dim=0))


def count(routing: Routing, counts: Tensor) -> Tensor:
    """What a :class:`Router` counts, (E + 3,) fp64 without a graph.

    Args:
        routing: of T tokens.
        counts: (E,), how many tokens each expert got.
    """
    probabilities = routing.probabilities.detach()
    entropy = torch.special.entr(probabilities).sum(dtype=torch.float64)
    counts = counts.double()
    # Filled where they are: a copy from the host would wait for the GPU.
    tokens, choices = (counts.new_full((1,), size) for size in (probabilities.shape[0], routing.experts.numel()))
    return torch.cat((counts, tokens, choices, entropy.view(1)))


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
        outputs = _Copy.apply(grouped_linear(inner, down, ends, grouped), back, order, 1)  # (T * k, dim)
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


class _Copy(torch.autograd.Function):
    """Rows in another order, so many copies of each: choice c is of row c // copies.

    ``back`` is the inverse of ``order``: the gradient is read, and summed over the copies, in a fixed order.
    """

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
        counts: (E + 3,) fp64, see :class:`Router`.
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
        self.router = Router(config)
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
        loss = routing.weights.new_zeros(())
        if self.balance_coefficient:
            loss = self.balance_coefficient * balance_loss(routing, counts)
        return MoEOutput(output, loss, count(routing, counts))
