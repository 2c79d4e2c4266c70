"""Corrections for gradients one update old that others published: DC-ASGD, optimistic gradients, PipeMare, AsyncPP.

Adan, Lion and MARS are those of ``pytorch_optimizer``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT


class Correction(Optimizer):
    """Wrap an optimizer, whose parameter groups it shares.

    Args:
        params: what the base optimizer takes.
        base: makes the optimizer from ``params``.
    """

    def __init__(self, params: ParamsT, base: Callable[[Iterable], Optimizer]) -> None:
        self.base = base(params)
        super().__init__(self.base.param_groups, {})
        self.param_groups = self.base.param_groups
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the base optimizer's step with the correction before and after it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moving = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = {p: p.detach().clone() for p in moving}
        for p in moving:
            self.correct_gradient(p, p.grad)
        self.base.step()
        for p in moving:
            self.correct_step(p, before[p])
        self.steps += 1
        return loss

    def correct_gradient(self, p: Tensor, grad: Tensor) -> None:
        """Change the gradient in place."""

    def correct_step(self, p: Tensor, before: Tensor) -> None:
        """Change the weights after the step in place; ``before``: those before it."""


class DelayCompensation(Correction):
    """Correct the gradient by an approximate Hessian times the way that the weights have gone since.

    Source: DC-ASGD (Zheng et al., ICML 2017, arXiv 1609.08326). For a gradient g_t taken at W_{t-1}::

        g_t + k * g_t * g_t * (W_t - W_{t-1})                          element by element; k = strength
        k   = strength / sqrt(q_t + 1e-7)                              if adaptive, with
        q_t = decay * q_{t-1} + (1 - decay) * g_t * g_t                q_{-1} = 0

    g * g stands for the diagonal of the Hessian, as it would for a log-likelihood at its optimum.

    Args:
        params: what the base optimizer takes.
        base: makes the optimizer from ``params``.
        strength: lambda of the paper; in its experiments 0.04, and 2 if adaptive.
        adaptive: divide by the root of the mean square gradient (DC-ASGD-a).
        decay: of the mean square.
    """

    def __init__(
        self,
        params: ParamsT,
        base: Callable[[Iterable], Optimizer],
        strength: float = 0.04,
        adaptive: bool = False,
        decay: float = 0.95,
    ) -> None:
        super().__init__(params, base)
        self.strength, self.adaptive, self.decay = strength, adaptive, decay

    def correct_gradient(self, p: Tensor, grad: Tensor) -> None:
        """Add the Hessian's part."""
        state, hessian = self.state[p], grad * grad
        if self.adaptive:
            mean_square = state.setdefault("mean_square", torch.zeros_like(p)).lerp_(hessian, 1.0 - self.decay)
            hessian.div_((mean_square + 1e-7).sqrt_())
        grad.add_(hessian.mul_(p - state.get("older", p)), alpha=self.strength)
        state["older"] = p.detach().clone()


class GradientExtrapolation(Correction):
    """Correct the gradient, before the optimizer sees it, by its own change: Error Feedback on gradients.

    The rule of optimistic methods (Daskalakis et al., ICLR 2018, arXiv 1711.00141)::

        g_t + strength * (g_t - g_{t-1})                              no correction at the first update
    """

    def __init__(self, params: ParamsT, base: Callable[[Iterable], Optimizer], strength: float = 1.0) -> None:
        super().__init__(params, base)
        self.strength = strength

    def correct_gradient(self, p: Tensor, grad: Tensor) -> None:
        """Add the difference."""
        new = grad.clone()
        grad.add_(grad - self.state[p].get("gradient", grad), alpha=self.strength)
        self.state[p]["gradient"] = new


class LearningRateDiscount(Correction):
    """Take shorter steps at the beginning: ``step * staleness ** -(1 - min(t / anneal_steps, 1))``, t = 0, 1, ...

    Source: PipeMare (Yang et al., MLSys 2021, arXiv 1910.05124), its first technique.
    """

    def __init__(
        self,
        params: ParamsT,
        base: Callable[[Iterable], Optimizer],
        anneal_steps: int = 100,
        staleness: float = 2.0,
    ) -> None:
        super().__init__(params, base)
        self.anneal_steps, self.staleness = anneal_steps, staleness

    def correct_step(self, p: Tensor, before: Tensor) -> None:
        """Go back by the rest."""
        power = 1.0 - min(self.steps / self.anneal_steps, 1.0)
        p.lerp_(before, 1.0 - float(self.staleness) ** -power)


class NesterovLookAhead(Correction):
    """Take gradients at a point ahead in the direction of travel, and discount them by the momentum.

    Source: AsyncPP (Ajanthan et al., ICML 2025, arXiv 2505.01099). With u_t the step of any base optimizer::

        c_k     = momentum * (1 - 0.5 * 0.96 ** (k * momentum_decay))        k = 1, 2, ...; the schedule of NAdam
        Y_{t+1} = W_t - (1 - c_{t+1}) * u_t                                  Y_0 = W_0
        W_{t+1} = Y_{t+1} + c_{t+2} * (Y_{t+1} - Y_t)                        gradients are taken here
    """

    def __init__(
        self,
        params: ParamsT,
        base: Callable[[Iterable], Optimizer],
        momentum: float = 0.99,
        momentum_decay: float = 0.004,
    ) -> None:
        super().__init__(params, base)
        self.momentum, self.momentum_decay = momentum, momentum_decay

    def correct_step(self, p: Tensor, before: Tensor) -> None:
        """Discount the step and look ahead."""
        last = self.state[p].get("trajectory", before)
        p.lerp_(before, self._momentum_at(self.steps + 1))  # Y_{t+1}: what is left of the step
        self.state[p]["trajectory"] = p.detach().clone()
        p.add_(self.state[p]["trajectory"] - last, alpha=self._momentum_at(self.steps + 2))

    def _momentum_at(self, update: int) -> float:
        return float(self.momentum * (1.0 - 0.5 * 0.96 ** (update * self.momentum_decay)))
