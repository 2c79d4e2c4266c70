"""Problems on which docs/theory.md is checked: their gradients, smoothness constants and noise."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from tests.theory.iterations import (
    Adam,
    Array,
    Method,
    nuclear_norm,
    polar,
    run_method,
    train,
)

_FEATURES = np.random.default_rng(7).standard_normal((40, 5))
_LABELS = np.random.default_rng(8).integers(0, 2, 40)


@dataclass(frozen=True)
class MatrixLeastSquares:
    """f(W) = |A W - C|_F^2 / 2 with W of shape (n, k), n <= k, through H = A^T A and the minimiser W*.

    Its smoothness from the spectral to the nuclear norm is exactly L = tr H: |H X|_nuclear <= tr(H) |X|_spectral,
    with equality for X with orthonormal rows.
    """

    h: Array
    minimiser: Array

    @classmethod
    def random(cls, seed: int, rows: int = 4, columns: int = 4, condition_number: float = 10.0) -> MatrixLeastSquares:
        generator = np.random.default_rng(seed)
        q, _ = np.linalg.qr(generator.standard_normal((rows, rows)))
        eigenvalues = np.geomspace(1 / condition_number, 1, rows)
        return cls((q * eigenvalues) @ q.T, generator.standard_normal((rows, columns)))

    def value(self, w: Array) -> Array:
        difference = w - self.minimiser
        return np.asarray(0.5 * (difference * (self.h @ difference)).sum((-2, -1)))

    def gradient(self, w: Array) -> Array:
        return np.asarray(self.h @ (w - self.minimiser))

    @property
    def smoothness(self) -> float:
        return float(np.trace(self.h))


def logistic_gradient(w: Array) -> Array:
    """Gradient of a small regularised logistic regression: smooth and not quadratic."""
    probabilities = 1 / (1 + np.exp(-_FEATURES @ w))
    return np.asarray(_FEATURES.T @ (probabilities - _LABELS) / len(_LABELS) + 0.1 * w)


@cache
def distance_slope(delay: int, strength: float, beta: float) -> float:
    """Exponent p of max_t |W_t - W_t^sync| ~ lr^p over the fixed time lr * updates = 3, logistic regression."""
    start, lrs = np.linspace(-2, 2, 5), [0.04, 0.02, 0.01]
    distances = []
    for lr in lrs:
        updates = round(3 / lr)
        delayed = run_method(Method(beta, delay, strength), logistic_gradient, start, lr=lr, updates=updates)
        fresh = run_method(Method(beta), logistic_gradient, start, lr=lr, updates=updates)
        distances.append(np.abs(delayed.weights - fresh.weights).max())
    return float(np.polyfit(np.log(lrs), np.log(distances), 1)[0])


@cache
def measured_radius(method: Method, noise: float, updates: int = 1200, lr: float = 0.02) -> float:
    """Average nuclear norm of the gradient over the last half of a run with the spectral LMO, over L * lr.

    ``noise`` is the standard deviation of the Gaussian noise on each entry of the gradient.
    """
    problem = MatrixLeastSquares.random(0)
    shape = problem.minimiser.shape
    xi = noise * np.random.default_rng(1).standard_normal((updates, *shape)) if noise else None
    run = run_method(method, problem.gradient, np.zeros(shape), lr=lr, updates=updates, map_momentum=polar, noise=xi)
    norms = nuclear_norm(problem.gradient(run.weights[updates // 2 :]))
    return float(norms.mean() / (problem.smoothness * lr))


@cache
def adam_floor(method: Method, beta2: float, noise: float = 0.0, updates: int = 2000, lr: float = 0.01) -> float:
    """Root mean square of W - W* over the last half of a run of Adam, over lr: median of 8 eigenvalues 0.01 .. 1."""
    eigenvalues = np.geomspace(0.01, 1, 8)
    generator = np.random.default_rng(2)
    start, xi = generator.standard_normal(8), noise * generator.standard_normal((updates, 8))
    rule = Adam(method.beta, beta2, method.nesterov)
    run = train(
        lambda w: np.asarray(eigenvalues * w),
        start,
        rule,
        lr=lr,
        updates=updates,
        delay=method.delay,
        strength=method.strength,
        noise=xi,
    )
    return float(np.median(np.sqrt((run.weights[updates // 2 :] ** 2).mean(0))) / lr)
