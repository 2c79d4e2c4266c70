"""Problems on which research/notes/theory.md is checked: their gradients, smoothness constants and noise."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from research.theory.iterations import (
    Adam,
    Array,
    Method,
    Run,
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
        """Make a random problem with this condition number."""
        generator = np.random.default_rng(seed)
        q, _ = np.linalg.qr(generator.standard_normal((rows, rows)))
        eigenvalues = np.geomspace(1 / condition_number, 1, rows)
        return cls((q * eigenvalues) @ q.T, generator.standard_normal((rows, columns)))

    def value(self, w: Array) -> Array:
        """Return f at w."""
        difference = w - self.minimiser
        return np.asarray(0.5 * (difference * (self.h @ difference)).sum((-2, -1)))

    def gradient(self, w: Array) -> Array:
        """Return the gradient of f at w."""
        return np.asarray(self.h @ (w - self.minimiser))

    @property
    def smoothness(self) -> float:
        """L."""
        return float(np.trace(self.h))


@dataclass(frozen=True)
class StagedQuadratic:
    """Gradient H w of six weights on three stages; stage s runs the share phi_s of the microbatches on older weights.

    So the mean gradient is H (w_t - Phi (w_t - w_{t-1})): of a weight the age is that of the stage that holds it.
    """

    h: Array
    phi: Array

    @classmethod
    def random(cls, *phi: float) -> StagedQuadratic:
        """Make a random problem with these shares, by stage."""
        a = np.random.default_rng(0).standard_normal((6, 6))
        return cls(a @ a.T / 6 + 0.1 * np.eye(6), np.repeat(phi, 2))

    def gradient(self, w: Array) -> Array:
        """Return the gradient of f at w."""
        return np.asarray(self.h @ w)

    def run(self, beta: float, lr: float, feedback: bool) -> Run:
        """Train up to lr * updates = 3, with Error Feedback of strength phi_s on each stage or without."""
        strength = self.phi if feedback else 0.0
        rule, start = Method(beta).rule(), np.ones(6)
        return train(self.gradient, start, rule, lr=lr, updates=round(3 / lr), delay=1, phi=self.phi, strength=strength)

    def rate(self, method: Method, lr: float, feedback: bool) -> float:
        """Largest modulus of an eigenvalue of the iteration on (w_t, w_{t-1}, m_{t-1}, u_{t-1})."""
        n, one, phi = len(self.h), np.eye(len(self.h)), np.diag(self.phi)
        state = np.eye(4 * n)
        w, old, m, u = (state[n * i : n * (i + 1)] for i in range(4))
        g = self.h @ (w - phi @ (w - old))
        average = method.beta * m + (1 - method.beta) * g
        step = lr * ((1 - method.beta) * g + method.beta * average if method.nesterov else average)
        corrected = (one + phi) @ step - phi @ u if feedback else step
        return float(np.abs(np.linalg.eigvals(np.vstack([w - corrected, w, average, step]))).max())


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
def orbit_run(method: Method, noise: float, updates: int = 1200, lr: float = 0.02, seed: int = 1) -> Run:
    """Run of the spectral LMO on the 4 x 4 problem of section 5, condition number 10.

    ``noise`` is the standard deviation of the Gaussian noise on each entry of the gradient.
    """
    problem = MatrixLeastSquares.random(0)
    shape = problem.minimiser.shape
    xi = noise * np.random.default_rng(seed).standard_normal((updates, *shape)) if noise else None
    return run_method(method, problem.gradient, np.zeros(shape), lr=lr, updates=updates, map_momentum=polar, noise=xi)


@cache
def measured_radius(method: Method, noise: float, lr: float = 0.02, seed: int = 1) -> float:
    """Average nuclear norm of the gradient over the last half of an :func:`orbit_run`, over L * lr."""
    problem, weights = MatrixLeastSquares.random(0), orbit_run(method, noise, lr=lr, seed=seed).weights
    norms = nuclear_norm(problem.gradient(weights[len(weights) // 2 :]))
    return float(norms.mean() / (problem.smoothness * lr))


@cache
def adam_floors(method: Method, beta2: float, noise: float = 0.0, updates: int = 2000, seed: int = 2) -> Array:
    """Root mean square of W - W* over the last half of a run of Adam, over lr, for 8 eigenvalues 0.01 .. 1."""
    eigenvalues = np.geomspace(0.01, 1, 8)
    generator, lr = np.random.default_rng(seed), 0.01
    start, xi = generator.standard_normal(8), noise * generator.standard_normal((updates, 8))
    rule = Adam(method.beta, beta2, method.nesterov)
    run = train(
        lambda w: np.asarray(eigenvalues * w), start, rule, lr=lr, updates=updates, delay=method.delay,
        strength=method.strength, noise=xi,
    )  # fmt: skip
    return np.asarray(np.sqrt((run.weights[updates // 2 :] ** 2).mean(0)) / lr)


def adam_floor(method: Method, beta2: float, noise: float = 0.0, seed: int = 2) -> float:
    """Median of :func:`adam_floors` over the eigenvalues."""
    return float(np.median(adam_floors(method, beta2, noise, seed=seed)))
