"""Nesterov's look-ahead as a correction for delayed gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from lightning_asyncpp.optim.correction import DelayCorrection, Weights
from lightning_asyncpp.optim.correction_checks import check_arguments, check_base


class NesterovLookAhead(DelayCorrection):
    """Take gradients at a point ahead in the direction of travel, and discount them by the momentum.

    Source: Ajanthan et al., "Nesterov Method for Asynchronous Pipeline Parallel Optimization" (AsyncPP, ICML 2025,
    arXiv 2505.01099), whose rule is w_{t+1} = w_t + d_t - lr * (1 - c_t) * g(w + d), d_t = c_t * (w_t - w_{t-1}), with
    a gradient some updates old. Here u_t is the step of any base optimizer, best one without momentum of its own::

        c_k     = momentum * (1 - 0.5 * 0.96 ** (k * momentum_decay))        k = 1, 2, ...; the schedule of NAdam
        Y_{t+1} = W_t - (1 - c_{t+1}) * u_t                                  Y_0 = W_0
        W_{t+1} = Y_{t+1} + c_{t+2} * (Y_{t+1} - Y_t)                        gradients are taken here

    With a constant u the weights move by u per update, as without it. A parameter without a gradient is left alone. The
    authors' own optimizer is NAdam with a momentum of 0.99 and decoupled weight decay, which needs no wrapper:
    ``torch.optim.NAdam(betas=(0.99, 0.999), decoupled_weight_decay=True)``.

    Memory: one buffer per parameter, Y_t, in the parameter's dtype, and the weights before the step as for
    ErrorFeedback.

    Args:
        params: what the base optimizer takes: tensors, (name, tensor) pairs or groups.
        base: makes the optimizer from ``params``.
        momentum: what c_t rises to, in [0, 1).
        momentum_decay: how fast it rises, at least 0; 0 keeps it at half of ``momentum``, 0.004 is torch's default.

    Raises:
        ValueError: all problems of the configuration at once.
        TypeError: ``base`` is not a callable that returns an optimizer.
    """

    state_name = "nesterov_look_ahead"
    buffer_names = ("trajectory",)
    option_names = ("momentum", "momentum_decay")

    def __init__(
        self,
        params: ParamsT,
        base: Callable[[Iterable], Optimizer],
        momentum: float = 0.99,
        momentum_decay: float = 0.004,
    ) -> None:
        check_base(base)
        problems = []
        if not 0 <= momentum < 1:
            problems.append(f"momentum must be in [0, 1), got {momentum!r}")
        if not momentum_decay >= 0:
            problems.append(f"momentum_decay must be at least 0, got {momentum_decay!r}")
        check_arguments("NesterovLookAhead", problems)
        super().__init__(params, base)
        self.momentum = momentum
        self.momentum_decay = momentum_decay

    def _after_step(self, moving: list[Tensor], before: Weights) -> None:
        now, following = self._momentum_at(self._memory.steps + 1), self._momentum_at(self._memory.steps + 2)
        known = self._memory.buffers["trajectory"]
        for p in moving:
            if p not in known:
                self._buffer("trajectory", p).copy_(before[p])
            trajectory = known[p]
            p.lerp_(before[p], now)  # Y_{t+1}: what is left of the step
            last = trajectory.clone()
            trajectory.copy_(p)
            p.add_(trajectory - last, alpha=following)

    def _momentum_at(self, update: int) -> float:
        rising: float = 1.0 - 0.5 * 0.96 ** (update * self.momentum_decay)
        return self.momentum * rising
