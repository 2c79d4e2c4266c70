"""Delay compensation: a first-order guess at the gradient that the newest weights would have."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from lightning_asyncpp.optim.correction import DelayCorrection, Weights
from lightning_asyncpp.optim.correction_checks import check_arguments, check_base

EPSILON = 1e-7


class DelayCompensation(DelayCorrection):
    """Correct the gradient by an approximate Hessian times the way that the weights have gone since.

    Source: DC-ASGD (Zheng et al., ICML 2017, arXiv 1609.08326). For a gradient g_t taken at W_{t-d}::

        g_t + k * g_t * g_t * (W_t - W_{t-d})                          element by element; k = strength
        k   = strength / sqrt(q_t + 1e-7)                              if adaptive, with
        q_t = decay * q_{t-1} + (1 - decay) * g_t * g_t                q_{-1} = 0

    g * g stands for the diagonal of the Hessian, as it would for a log-likelihood at its optimum. The base optimizer
    gets the corrected gradient; gradients are clipped before.

    Memory: d buffers per parameter, its last d weights, in its dtype; one more if adaptive.

    Args:
        params: what the base optimizer takes: tensors, (name, tensor) pairs or groups.
        base: makes the optimizer from ``params``.
        strength: lambda of the paper, at least 0; in its experiments 0.04, and 2 if adaptive.
        adaptive: divide by the root of the mean square gradient (DC-ASGD-a).
        decay: of the mean square, in [0, 1).

    Raises:
        ValueError: all problems of the configuration at once.
        TypeError: ``base`` is not a callable that returns an optimizer.
    """

    state_name = "delay_compensation"
    buffer_names = ("weights", "mean_square")
    option_names = ("strength", "adaptive", "decay")

    def __init__(
        self,
        params: ParamsT,
        base: Callable[[Iterable], Optimizer],
        strength: float = 0.04,
        adaptive: bool = False,
        decay: float = 0.95,
    ) -> None:
        check_base(base)
        problems = []
        if not strength >= 0:
            problems.append(f"strength must be at least 0, got {strength!r}")
        if not 0 <= decay < 1:
            problems.append(f"decay must be in [0, 1), got {decay!r}")
        check_arguments("DelayCompensation", problems)
        super().__init__(params, base)
        self.strength = strength
        self.adaptive = adaptive
        self.decay = decay

    def _before_step(self, moving: list[Tensor], before: Weights) -> None:
        for p in self._remembered(before):
            older = self._exchange_oldest(p, before.get(p, p.detach()))
            if p in before:
                assert p.grad is not None
                if self.adaptive and p.grad.is_sparse:
                    p.grad = p.grad.to_dense()  # the mean square forgets everywhere
                p.grad.add_(self._hessian(p, p.grad).mul_(before[p] - older), alpha=self.strength)

    def _skip(self) -> None:
        for p in self._remembered({}):
            self._exchange_oldest(p, p.detach())
        self._memory.steps += 1

    def _remembered(self, before: Weights) -> list[Tensor]:
        """The delayed parameters whose weights are kept from now on, or are kept already."""
        known = self._memory.buffers["weights"]
        return [p for p in self._parameters() if self.delay_of(p) and (p in before or p in known)]

    def _hessian(self, p: Tensor, grad: Tensor) -> Tensor:
        hessian = grad * grad
        if self.adaptive:
            mean_square = self._buffer("mean_square", p).lerp_(hessian, 1.0 - self.decay)
            hessian.div_((mean_square + EPSILON).sqrt_())
        return hessian

    def _exchange_oldest(self, p: Tensor, weights: Tensor) -> Tensor:
        """Return W_{max(t-d, 0)} and keep W_t, ``weights``, in its place."""
        first = p not in self._memory.buffers["weights"]
        versions = self._buffer("weights", p)  # (d, *shape of p)
        if first:
            versions.copy_(weights.expand_as(versions))
        if len(versions) != self.delay_of(p):  # the delay was changed, or a state under another one was loaded
            versions = self._memory.buffers["weights"][p] = self._for_delay(versions, self.delay_of(p))
        slot = versions[self._memory.steps % self.delay_of(p)]
        oldest = slot.clone()
        slot.copy_(weights)
        return oldest

    def _for_delay(self, versions: Tensor, delay: int) -> Tensor:
        """The last ``delay`` weights of a ring of another length; where it has fewer, the oldest stand for older ones.

        Args:
            versions: (length, *shape of p), the oldest at ``steps % length``.
            delay: the length that is wanted.
        """
        in_order = versions.roll(-(self._memory.steps % len(versions)), 0)
        if (missing := delay - len(versions)) > 0:
            in_order = torch.cat([in_order[:1].expand(missing, *in_order.shape[1:]), in_order])
        return in_order[-delay:].roll(self._memory.steps % delay, 0)

    def _buffer_shape(self, name: str, p: Tensor) -> tuple[int, ...]:
        return (self.delay_of(p), *p.shape) if name == "weights" else tuple(p.shape)

    def _fits(self, name: str, p: Tensor, saved: Tensor) -> bool:
        if name != "weights":
            return super()._fits(name, p, saved)
        return saved.ndim == p.ndim + 1 and len(saved) > 0 and saved.shape[1:] == p.shape
