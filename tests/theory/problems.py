"""Problems on which docs/research/theory.md is checked: their gradients, smoothness constants and noise."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import nn

from tests.theory.iterations import (
    Adam,
    Array,
    Method,
    Momentum,
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


@dataclass(frozen=True)
class StagedQuadratic:
    """Gradient H w of six weights on three stages; stage s runs the share phi_s of the micro-batches on older weights.

    So the mean gradient is H (w_t - Phi (w_t - w_{t-1})): of a weight the age is that of the stage that holds it.
    """

    h: Array
    phi: Array

    @classmethod
    def random(cls, *phi: float) -> StagedQuadratic:
        a = np.random.default_rng(0).standard_normal((6, 6))
        return cls(a @ a.T / 6 + 0.1 * np.eye(6), np.repeat(phi, 2))

    def gradient(self, w: Array) -> Array:
        return np.asarray(self.h @ w)

    def run(self, beta: float, lr: float, feedback: bool) -> Run:
        """Up to lr * updates = 3, with Error Feedback of strength phi_s on each stage or without."""
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


class LeastSquares:
    """Linear regression from 3 inputs to 2 outputs, as a module, a loss and a plain gradient."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(8, 3, generator=generator, dtype=torch.float64)
        self.solution = torch.randn(2, 3, generator=generator, dtype=torch.float64)
        self.model = nn.Sequential(nn.Linear(3, 2, bias=False).double())
        # As Linear does, but always the same: by chance a weight could end so near 0 that roundings showed.
        nn.init.uniform_(self.model[0].weight, -(3**-0.5), 3**-0.5, generator=generator)  # type: ignore[arg-type]
        self.start = self.weights().copy()

    def weights(self) -> Array:
        weight = self.model[0].weight
        assert isinstance(weight, torch.Tensor)
        return np.asarray(weight.detach().numpy())

    def loss(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor((self.model(inputs) - inputs @ self.solution.T).square().mean())

    def gradient(self, w: Array) -> Array:
        x = self.inputs.numpy()
        return np.asarray((w - self.solution.numpy()) @ (x.T @ x) / 8)

    def expected(self, method: Method, lr: float, updates: int) -> Run:
        return run_method(method, self.gradient, self.start, lr=lr, updates=updates)


class HostileNoise:
    """Gradient ``eigenvalue * w`` plus the noise that keeps |gradient| at ``size``; counts its own variance.

    The direction that a step sees is the gradients' average G plus the noises' N. Given the past, N takes two values:
    one just turns the sign of G + N, the other, size^2 / |G|, lets the noise have mean zero. N has variance size^2.
    """

    def __init__(self, eigenvalue: float, size: float, beta: float, nesterov: bool) -> None:
        self.eigenvalue, self.size, self.beta = eigenvalue, size, beta
        self.carried = beta * beta if nesterov else beta  # what is left in N of the average of the earlier noises
        self.average_gradient, self.generator = Momentum(beta, nesterov), np.random.default_rng(0)
        self.average_noise: Array | None = None
        self.squares: list[float] = []

    def __call__(self, w: Array) -> Array:
        gradient = self.eigenvalue * w
        average = self.average_gradient(gradient)
        sign, height = np.where(average < 0, -1.0, 1.0), np.maximum(np.abs(average), 0.01 * self.size)
        old = self.average_noise
        mean = np.zeros_like(w) if old is None else self.carried * old * sign
        low, high = np.minimum(-1.001 * height, mean), np.maximum(self.size**2 / height, mean)
        chosen = np.where(self.generator.random(w.shape) * (high - low) < high - mean, low, high)
        xi = sign * (chosen - mean) / (1 if old is None else 1 - self.carried)
        self.average_noise = xi if old is None else self.beta * old + (1 - self.beta) * xi
        self.squares.append(float((xi**2).sum()))
        return np.asarray(gradient + xi)


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


def change_of_steps(method: Method, noise: float, lr: float = 0.02, seed: int = 1) -> float:
    """Average spectral norm of u_t - u_{t-1} over the last half of an :func:`orbit_run`, over lr."""
    steps = orbit_run(method, noise, lr=lr, seed=seed).steps
    changes = np.linalg.norm(np.diff(steps[len(steps) // 2 :], axis=0), 2, axis=(1, 2))
    return float(changes.mean() / lr)


@cache
def adam_floors(method: Method, beta2: float, noise: float = 0.0, updates: int = 2000, seed: int = 2) -> Array:
    """Root mean square of W - W* over the last half of a run of Adam, over lr, for 8 eigenvalues 0.01 .. 1."""
    eigenvalues = np.geomspace(0.01, 1, 8)
    generator, lr = np.random.default_rng(seed), 0.01
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
    return np.asarray(np.sqrt((run.weights[updates // 2 :] ** 2).mean(0)) / lr)


def adam_floor(method: Method, beta2: float, noise: float = 0.0, seed: int = 2) -> float:
    """Median of :func:`adam_floors` over the eigenvalues."""
    return float(np.median(adam_floors(method, beta2, noise, seed=seed)))
