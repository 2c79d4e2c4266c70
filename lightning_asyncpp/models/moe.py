"""Mixture-of-experts layer: router, experts, shared experts, and the balancing of the load."""

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
"""Return whether ``torch.autocast`` supports a type of device; it does not support "meta". The compiler takes the
result as a constant, since torch 2.11 cannot trace ``is_autocast_available``."""


class Routing(NamedTuple):
    """Result of a router for T tokens, E experts and k choices; all floating-point tensors are fp32.

    Attributes:
        experts: (T, k) int64, the experts of each token, highest score first.
        weights: (T, k), the weights of these experts' outputs.
        probabilities: (T, E), the scores of a token divided by their sum.
    """

    experts: Tensor
    weights: Tensor
    probabilities: Tensor


class Router(StatisticsLayer):
    """Router that scores the experts for each token and chooses ``top_k`` of them.

    With router "softmax" the scores are the softmax over all experts, as in Mixtral (arXiv 2401.04088) and Switch
    (arXiv 2101.03961). With "sigmoid" the scores are sigmoids, to which a bias is added for the choice alone,
    as in DeepSeek-V3 (arXiv 2412.19437) and GLM-4.5. The bias and its adaptation to the loads are from Wang et al.,
    "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts" (arXiv 2408.15664, Algorithm 1).

    The arithmetic is in fp32 whatever the dtype of tokens, weight or autocast: in bf16 two scores are often equal.

    Args:
        config: shape of the model, with experts.

    Attributes:
        weight: (E, dim).
        balance_bias: (E,), in fp32 even if the module is converted to another dtype, since in bf16 steps of 0.001
            vanish; None with router "softmax".
        num_statistics: E + 2. The statistics are the number of tokens of each expert (E numbers), the number of tokens,
            and the sum of the entropies of the tokens' probabilities, in nats.
    """

    metrics: ClassVar[Mapping[str, Literal["mean", "max", "min", "sum"]]] = {
        "moe_load_max": "max",
        "moe_load_min": "min",
        "moe_entropy": "mean",
    }
    balance_bias: Tensor | None

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        assert config.moe is not None
        self.moe: MoEConfig = config.moe
        self.num_statistics = self.moe.num_experts + 2
        self.weight = nn.Parameter(torch.empty(self.moe.num_experts, config.dim))
        has_bias = self.moe.router == "sigmoid"
        self.register_buffer("balance_bias", torch.empty(self.moe.num_experts) if has_bias else None)
        self.versioned_buffers = ("balance_bias",) if has_bias else ()

    def initialize(self, std: float) -> None:
        """Draw the weight from the global generator, normal with this standard deviation, and set the biases to 0."""
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
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)  # as in GLM-4.5; all sigmoids may be 0
        return Routing(experts, weights * self.moe.routed_scaling, probabilities)

    def _logits(self, x: Tensor) -> Tensor:
        device = x.device.type
        no_autocast = torch.autocast(device, enabled=False) if has_autocast(device) else nullcontext()
        dtype = torch.promote_types(x.dtype, torch.float32)
        with no_autocast:
            return F.linear(x.to(dtype), self.weight.to(dtype))  # (T, E)

    @torch.no_grad()
    def update_from_statistics(self, totals: Tensor) -> None:
        """Raise the biases of experts below the mean load by ``balance_bias_rate``; lower those of experts above it.

        Args:
            totals: (E + 2,), see :class:`Router`.
        """
        if self.balance_bias is None or not self.moe.balance_bias_rate:
            return
        counts = totals[:-2]
        direction = torch.sign(counts.mean() - counts).to(self.balance_bias, non_blocking=True)
        self.balance_bias.add_(direction, alpha=self.moe.balance_bias_rate)

    @classmethod
    def compute_metrics(cls, totals: Tensor) -> dict[str, float]:
        """Return the metrics: largest and smallest load divided by the mean load, and mean entropy (nats).

        The load of an expert is its number of tokens.
        """
        counts, (tokens, entropy) = totals[:-2], totals[-2:].tolist()
        mean = float(counts.mean()) or 1.0  # without any token the loads are 0
        return {
            "moe_load_max": float(counts.max()) / mean,
            "moe_load_min": float(counts.min()) / mean,
            "moe_entropy": entropy / max(tokens, 1.0),
        }

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> Router:
        # `module.to(torch.bfloat16)` rounds every floating-point buffer; this one is restored in fp32.
        before = self.balance_bias
        super()._apply(fn, recurse)
        if before is not None and self.balance_bias is not None and self.balance_bias.dtype != torch.float32:
            self.balance_bias = before.to(self.balance_bias.device, torch.float32)
        return self


def balance_loss(routing: Routing, counts: Tensor) -> Tensor:
    """Return E * sum over experts of f * P: 1 with even loads, up to E if all tokens are routed to the same expert.

    f is an expert's share of the T * k choices, and P is its mean probability. With one choice per token, this is the
    loss of Switch (arXiv 2101.03961, equation 4) without the coefficient. With k choices, the shares f still sum to 1,
    as in DeepSeek-V3 (arXiv 2412.19437, equations 17 to 20), so that the minimum does not depend on k.

    Args:
        routing: routing of T tokens.
        counts: (E,), number of tokens of each expert.
    """
    shares = counts / routing.experts.numel()  # (E,), f
    return len(counts) * torch.dot(shares.to(routing.probabilities.dtype), routing.probabilities.mean(dim=0))


def count(routing: Routing, counts: Tensor) -> Tensor:
    """Return the statistics of a :class:`Router`, (E + 2,) fp64, without gradients.

    Args:
        routing: routing of T tokens.
        counts: (E,), number of tokens of each expert.
    """
    probabilities = routing.probabilities.detach()
    entropy = torch.special.entr(probabilities).sum(dtype=torch.float64)
    counts = counts.double()
    # Fill on the device: a copy from the host would wait for the GPU.
    tokens = counts.new_full((1,), probabilities.shape[0])
    return torch.cat((counts, tokens, entropy.view(1)))


class Experts(nn.Module):
    """SwiGLU layers of equal shape, each for the tokens that are routed to it.

    Args:
        config: shape of the model, with experts.

    Attributes:
        gate: (E, width, dim), the stacked weights of E ``nn.Linear``.
        up: (E, width, dim).
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
        """Return whether the products run as torch's grouped matmul, and not as a loop over the experts."""
        _, width, dim = self.gate.shape
        dtype = self._dtype(device)
        return serves_grouped(device, dtype, dim, width) and serves_grouped(device, dtype, width, dim)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor, grouped: bool) -> tuple[Tensor, Tensor]:
        """Apply each token's experts to the token, and sum their weighted outputs.

        Args:
            x: (T, dim), the tokens.
            experts: (T, k) int64, the experts of each token.
            weights: (T, k) fp32, the weights of the experts' outputs; the sum is taken in this dtype.
            grouped: see :meth:`use_grouped`.

        Returns:
            The sum for each token, (T, dim), and the number of tokens of each expert, (E,) int32.
        """
        dtype = self._dtype(x.device)
        x, gate, up, down = (tensor.to(dtype) for tensor in (x, self.gate, self.up, self.down))
        order, back, ends = sort_by_expert(experts, len(self.gate))
        rows = _Copy.apply(x, order, back, experts.shape[1])  # (T * k, dim), sorted by expert
        inner = F.silu(grouped_linear(rows, gate, ends, grouped)) * grouped_linear(rows, up, ends, grouped)
        outputs = _Copy.apply(grouped_linear(inner, down, ends, grouped), back, order, 1)  # (T * k, dim)
        mixed = (outputs.view(*experts.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)  # (T, dim), in fp32
        return mixed.to(dtype), ends.diff(prepend=ends.new_zeros(1))

    def _dtype(self, device: torch.device) -> torch.dtype:
        # Autocast does not convert the operands of torch's grouped matmul.
        if has_autocast(device.type) and torch.is_autocast_enabled(device.type):
            return torch.get_autocast_dtype(device.type)
        return self.gate.dtype


def sort_by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the choices of T tokens by expert, and the choices of one expert by token.

    No values are copied to the host, and results do not depend on the order in which threads run.

    Args:
        experts: (T, k) int64; choice c belongs to token c // k.
        num_experts: E.

    Returns:
        The choices in the new order, (T * k,) int64; the inverse permutation; and the end of each expert's choices,
        (E,) int32.
    """
    flat = experts.flatten()
    in_order, order = flat.sort(stable=True)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    numbers = torch.arange(num_experts, device=order.device)
    return order, back, torch.searchsorted(in_order, numbers, right=True, out_int32=True)


class _Copy(torch.autograd.Function):
    """Repeat every row ``copies`` times, in the given order of copies; copy c is of row c // ``copies``.

    The backward uses ``back``, the inverse of ``order``, to sum the gradients of a row's copies in a fixed order.
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
    """Results of an MoE layer; the caller reports ``loss`` and ``counts`` (:mod:`lightning_asyncpp.auxiliary`).

    Attributes:
        output: the output, in the shape of the input.
        loss: the layer's part of the auxiliary loss, with its coefficient, a scalar.
        counts: (E + 2,) fp64, see :class:`Router`.
    """

    output: Tensor
    loss: Tensor
    counts: Tensor


class MoE(nn.Module):
    """Layer of experts in place of a block's SwiGLU; it has no side effects, so the backward may recompute it.

    Args:
        config: shape of the model, with experts.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        assert config.moe is not None
        # The loss is a mean over the layers, so that a coefficient means the same in deep and in shallow models.
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
