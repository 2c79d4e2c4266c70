"""Gradient extrapolation: what the gradient will be when it arrives, guessed from the last two."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from lightning_asyncpp.optim.correction import DelayCorrection, Weights
from lightning_asyncpp.optim.correction_checks import check_arguments, check_base


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
        check_arguments(
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
