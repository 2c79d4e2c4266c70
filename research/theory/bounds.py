"""Upper bounds of research/notes/theory.md on the average gradient of smooth functions."""

from __future__ import annotations

import math

from research.theory.iterations import Method
from research.theory.spectra import average_age, noise_share

CURVATURE, ERROR = 0.5, 2.0  # factors of L lr and of |m - grad f| in the descent inequality of LMO methods


def descent_bound(gap: float, smoothness: float, method: Method, lr: float, updates: int, noise: float = 0.0) -> float:
    """Statement 5.2 without Error Feedback; ``noise`` is rho sigma."""
    start_up = 1 / (updates * (1 - method.beta))
    share = math.sqrt(noise_share(method.beta, method.nesterov))
    smooth = smoothness * lr * (CURVATURE + ERROR * average_age(method))
    return gap / (lr * updates) + smooth + ERROR * noise * (share + start_up)


def tuned_momentum(gap: float, smoothness: float, updates: int, noise: float) -> tuple[float, float]:
    """beta and lr of statement 7.5 for LMO methods; ``noise`` is rho sigma."""
    fresh = math.sqrt(2 * smoothness * gap / updates) / noise  # 1 - beta
    return 1 - fresh, math.sqrt(gap * fresh / (2 * smoothness * updates))


def squared_gradient_bound(
    gap: float, smoothness: float, phi: float, lr: float, updates: int, variance: float
) -> float:
    """Statement 7.5 for gradient descent, on the average of |grad f|^2."""
    step = smoothness * lr
    return 2 * gap / (lr * updates) + (step + (phi * step) ** 2) * variance


def largest_step(phi: float) -> float:
    """L lr up to which :func:`squared_gradient_bound` is proved: L lr + (phi L lr)^2 = 1."""
    return 2 / (1 + math.sqrt(1 + 4 * phi * phi))
