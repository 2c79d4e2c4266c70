"""Corrections for delayed gradients: DC-ASGD, optimistic gradients, PipeMare's and AsyncPP's."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from lightning_asyncpp.optim.checks import check_base, raise_problems
from lightning_asyncpp.optim.correction import DelayCorrection, Weights

_EPSILON = 1e-7


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
    takes_fractions = False

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
        raise_problems("DelayCompensation", problems)
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
        return [p for p in self._parameters() if self._versions_of(p) and (p in before or p in known)]

    def _hessian(self, p: Tensor, grad: Tensor) -> Tensor:
        hessian = grad * grad
        if self.adaptive:
            mean_square = self._buffer("mean_square", p).lerp_(hessian, 1.0 - self.decay)
            hessian.div_((mean_square + _EPSILON).sqrt_())
        return hessian

    def _exchange_oldest(self, p: Tensor, weights: Tensor) -> Tensor:
        """Return W_{max(t-d, 0)} and keep W_t, ``weights``, in its place."""
        first = p not in self._memory.buffers["weights"]
        versions = self._buffer("weights", p)  # (d, *shape of p)
        if first:
            versions.copy_(weights.expand_as(versions))
        if len(versions) != self._versions_of(p):  # the delay was changed, or a state under another one was loaded
            versions = self._memory.buffers["weights"][p] = self._for_delay(versions, self._versions_of(p))
        slot = versions[self._memory.steps % self._versions_of(p)]
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
        return (self._versions_of(p), *p.shape) if name == "weights" else tuple(p.shape)

    def _fits(self, name: str, p: Tensor, saved: Tensor) -> bool:
        if name != "weights":
            return super()._fits(name, p, saved)
        return saved.ndim == p.ndim + 1 and len(saved) > 0 and saved.shape[1:] == p.shape

    def _versions_of(self, p: Tensor) -> int:
        return int(self.delay_of(p))


class GradientExtrapolation(DelayCorrection):
    """Correct the gradient, before the optimizer sees it, by its own change: Error Feedback on gradients.

    The rule of optimistic methods (Daskalakis et al., ICLR 2018, arXiv 1711.00141), for comparison with
    :class:`~lightning_asyncpp.optim.ErrorFeedback`, which corrects the step instead::

        g_t + strength * (g_t - g_{t-1})                              no correction at the first update

    For gradient descent, with or without momentum, and a constant learning rate both are the same, but for the start;
    behind normalisation or orthogonalisation they are not. The noise of mini-batches is amplified: g_t comes with
    1 + strength, g_{t-1} with strength. Gradients are clipped before.

    Memory: one buffer per parameter, g_{t-1}, in the gradient's dtype.

    Args:
        params: what the base optimizer takes: tensors, (name, tensor) pairs or groups.
        base: makes the optimizer from ``params``.
        strength: factor on the difference, at least 0.

    Raises:
        ValueError: the strength is below 0.
        TypeError: ``base`` is not a callable that returns an optimizer.
    """

    state_name = "gradient_extrapolation"
    buffer_names = ("gradient",)
    option_names = ("strength",)
    needs_weights_before = False

    def __init__(self, params: ParamsT, base: Callable[[Iterable], Optimizer], strength: float = 1.0) -> None:
        check_base(base)
        raise_problems(
            "GradientExtrapolation", [] if strength >= 0 else [f"strength must be at least 0, got {strength!r}"]
        )
        super().__init__(params, base)
        self.strength = strength

    def _before_step(self, moving: list[Tensor], before: Weights) -> None:
        known = self._memory.buffers["gradient"]
        for p in moving:
            assert p.grad is not None
            if p.grad.is_sparse:
                p.grad = p.grad.to_dense()
            first = p not in known
            previous = self._buffer("gradient", p)
            if first:
                previous.copy_(p.grad)
                continue
            gradient = p.grad.clone()
            p.grad.add_(torch.sub(p.grad, previous), alpha=self.strength)
            previous.copy_(gradient)


class LearningRateDiscount(DelayCorrection):
    """Divide steps by the staleness of their gradients, less and less so over the first updates.

    Source: PipeMare (Yang et al., MLSys 2021, arXiv 1910.05124), technique T1. With u_t the base optimizer's step and
    tau the staleness::

        p_t     = 1 - min(t / anneal_steps, 1)
        W_{t+1} = W_t - u_t / tau ** p_t

    PipeMare's tau is the delay in updates. For gradients one update old that is 1, and the rule changes nothing: give
    ``staleness`` to discount them all the same. (Its technique T2 corrects backwards that run on other weights than
    their forwards; there is nothing like that here: both run on the same version.)

    Memory: no buffer; the weights before the step as for ErrorFeedback.

    Args:
        params: what the base optimizer takes: tensors, (name, tensor) pairs or groups.
        base: makes the optimizer from ``params``.
        anneal_steps: updates after which steps are whole, at least 1.
        staleness: tau, at least 1; None: the number of updates that the parameter's gradients are old.

    Raises:
        ValueError: all problems of the configuration at once.
        TypeError: ``base`` is not a callable that returns an optimizer.
    """

    state_name = "learning_rate_discount"
    buffer_names = ()
    option_names = ("anneal_steps", "staleness")
    takes_fractions = False

    def __init__(
        self,
        params: ParamsT,
        base: Callable[[Iterable], Optimizer],
        anneal_steps: int = 100,
        staleness: float | None = None,
    ) -> None:
        check_base(base)
        problems = []
        if anneal_steps < 1:
            problems.append(f"anneal_steps must be at least 1, got {anneal_steps!r}")
        if staleness is not None and not staleness >= 1:
            problems.append(f"staleness must be at least 1, or None for the delay, got {staleness!r}")
        raise_problems("LearningRateDiscount", problems)
        super().__init__(params, base)
        self.anneal_steps = anneal_steps
        self.staleness = staleness

    def _after_step(self, moving: list[Tensor], before: Weights) -> None:
        power = 1.0 - min(self._memory.steps / self.anneal_steps, 1.0)
        if power == 0:
            return
        for p in moving:
            staleness = self.delay_of(p) if self.staleness is None else self.staleness
            p.lerp_(before[p], 1.0 - float(staleness) ** -power)


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
        raise_problems("NesterovLookAhead", problems)
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
