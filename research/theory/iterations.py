"""The iterations of research/notes/theory.md, written out: float64, one process, nothing of the package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
Rule: TypeAlias = Callable[[Array], Array]
"""Gradient in, step per unit of learning rate out; it may keep state such as momentum."""


@dataclass(frozen=True)
class Method:
    """A linear method: momentum m = beta m + (1 - beta) g, delay d, Error Feedback of strength s.

    ``phi`` is the share of each gradient that is d updates old; the rest is fresh.
    """

    beta: float = 0.0
    delay: int = 0
    strength: float = 0.0
    nesterov: bool = False
    phi: float = 1.0

    def rule(self, map_momentum: Rule | None = None) -> Rule:
        """Make a fresh base rule; ``map_momentum`` is the LMO, the identity by default."""
        return Momentum(self.beta, self.nesterov, map_momentum)


class Momentum:
    """m_t = beta m_{t-1} + (1 - beta) g_t from m_0 = g_0; Nesterov's form steps along (1 - beta) g_t + beta m_t."""

    def __init__(self, beta: float, nesterov: bool = False, map_momentum: Rule | None = None) -> None:
        self.beta, self.nesterov, self.map_momentum = beta, nesterov, map_momentum
        self.m: Array | None = None

    def __call__(self, g: Array) -> Array:
        """One step."""
        self.m = g if self.m is None else self.beta * self.m + (1 - self.beta) * g
        direction = (1 - self.beta) * g + self.beta * self.m if self.nesterov else self.m
        return direction if self.map_momentum is None else self.map_momentum(direction)


class Adam:
    """Kingma and Ba (2015) with bias correction; ``nesterov`` replaces m_t by (1 - beta1) g_t + beta1 m_t."""

    def __init__(self, beta1: float, beta2: float, nesterov: bool = False) -> None:
        self.beta1, self.beta2, self.nesterov, self.t = beta1, beta2, nesterov, 0
        self.m: Array | float = 0.0
        self.v: Array | float = 0.0

    def __call__(self, g: Array) -> Array:
        """One step."""
        self.t += 1
        self.m = self.beta1 * self.m + (1 - self.beta1) * g
        self.v = self.beta2 * self.v + (1 - self.beta2) * g * g
        m = (1 - self.beta1) * g + self.beta1 * self.m if self.nesterov else self.m
        root: Array = np.sqrt(self.v / (1 - self.beta2**self.t))
        return m / (1 - self.beta1**self.t) / (root + 1e-16)


@dataclass(frozen=True)
class Run:
    """``weights``: W_0 .. W_T, shape (T + 1, ...); ``steps``: the base steps u_0 .. u_{T-1}, shape (T, ...)."""

    weights: Array
    steps: Array

    def base_trajectory(self) -> Array:
        """Y_0 .. Y_T with Y_0 = W_0 and Y_{t+1} = Y_t - u_t."""
        return np.concatenate([self.weights[:1], self.weights[0] - np.cumsum(self.steps, axis=0)])


def train(
    gradient: Rule,
    start: Array,
    rule: Rule,
    *,
    lr: float,
    updates: int,
    delay: int = 0,
    strength: Array | float = 0.0,
    phi: Array | float = 1.0,
    noise: Array | None = None,
) -> Run:
    """W_{t+1} = W_t - (u_t + s (u_t - u_{t-1})), u_t = lr * rule(gradient(W_{max(t-d, 0)}) + noise_t).

    With phi < 1 the gradient is phi * gradient(W_{max(t-d, 0)}) + (1 - phi) * gradient(W_t). An array of phi or of
    strengths has one number per weight, that of its stage; only for a gradient that is linear (affine) in the weights.
    """
    weights = [start]
    steps: list[Array] = []
    for t in range(updates):
        g = _mixed_gradient(gradient, weights[max(t - delay, 0)], weights[t], phi)
        u = lr * rule(g if noise is None else g + noise[t])
        corrected = u + strength * (u - steps[-1]) if steps else u
        steps.append(u)
        weights.append(weights[-1] - corrected)
    return Run(np.stack(weights), np.stack(steps))


def _mixed_gradient(gradient: Rule, old: Array, new: Array, phi: Array | float) -> Array:
    if isinstance(phi, np.ndarray):  # each microbatch mixes the versions of the stages: one affine gradient of the mean
        return gradient(phi * old + (1 - phi) * new)
    return gradient(old) if phi == 1 else phi * gradient(old) + (1 - phi) * gradient(new)


def run_method(
    method: Method, gradient: Rule, start: Array, *, lr: float, updates: int, map_momentum: Rule | None = None,
    noise: Array | None = None,
) -> Run:  # fmt: skip
    """:func:`train` with the delay, share, strength and momentum of ``method``."""
    options: dict[str, Any] = {"delay": method.delay, "strength": method.strength, "phi": method.phi, "noise": noise}
    return train(gradient, start, method.rule(map_momentum), lr=lr, updates=updates, **options)


def polar(m: Array) -> Array:
    """LMO of the spectral-norm ball: the orthogonal polar factor of a (rows, columns) matrix, by SVD."""
    u, _, vt = np.linalg.svd(m, full_matrices=False)
    return np.asarray(u @ vt)


def sign(m: Array) -> Array:
    """LMO of the ball of the maximum norm."""
    return np.asarray(np.sign(m))


def nuclear_norm(g: Array) -> Array:
    """Dual of the spectral norm, over the last two dimensions."""
    return np.asarray(np.linalg.svd(g, compute_uv=False).sum(-1))
