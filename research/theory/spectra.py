"""Characteristic polynomials of the delayed methods on quadratics, and what research/notes/theory.md reads off them."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from research.theory.iterations import Array, Method


def characteristic(method: Method, h: float) -> Array:
    """Coefficients in z, highest power first, for one eigenvalue lambda with h = lr * lambda.

    With x = 1/z:  (1 - x)(1 - beta x) + (1 - beta) h x (1 - phi + phi x^d) N(x),  N = (1 + beta - beta x for Nesterov)
    times (1 + s - s x for Error Feedback).
    """
    left = np.convolve([1.0, -1.0], [1.0, -method.beta])
    age = np.zeros(1 + method.delay)
    age[0] += 1 - method.phi
    age[-1] += method.phi
    right = (1 - method.beta) * h * np.concatenate([[0.0], np.convolve(age, numerator(method))])
    total = np.zeros(max(len(left), len(right)))
    total[: len(left)] += left
    total[: len(right)] += right
    return total


def numerator(method: Method, feedback: bool = True) -> Array:
    """N(x), lowest power first; without the factor of Error Feedback if not ``feedback``."""
    n = np.array([1.0])
    if method.nesterov:
        n = np.convolve(n, [1 + method.beta, -method.beta])
    if feedback and method.strength:
        n = np.convolve(n, [1 + method.strength, -method.strength])
    return n


def rate(method: Method, h: float) -> float:
    """Factor by which the error shrinks per update: the largest modulus of a root."""
    return float(np.abs(np.roots(characteristic(method, h))).max())


def rates(method: Method, hs: Array) -> Array:
    """:func:`rate` of many h at once."""
    polynomials = np.stack([characteristic(method, h) for h in hs])
    n = polynomials.shape[1] - 1
    companion = np.zeros((len(hs), n, n))
    companion[:, 0] = -polynomials[:, 1:]
    companion[:, range(1, n), range(n - 1)] = 1
    return np.asarray(np.abs(np.linalg.eigvals(companion)).max(-1))


@cache
def stability_limit(method: Method) -> float:
    """Smallest h at which a root reaches the unit circle, by search on the roots, no formula."""
    high = 0.05
    while rate(method, high) < 1:
        high *= 1.1
    low = high / 1.1
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if rate(method, middle) < 1 else (low, middle)
    return low


def critical_root(method: Method) -> complex:
    """Root on the unit circle at the stability limit, the one in the upper half plane."""
    roots = np.roots(characteristic(method, stability_limit(method)))
    z = complex(roots[np.abs(roots).argmax()])
    return complex(z.real, abs(z.imag))


def orbit_radius(method: Method) -> float:
    """Amplitude of the rotating orbit of an LMO method in units of lr: |1 + s - s/z| / |z - 1| at the critical root."""
    z = critical_root(method)
    return abs(1 + method.strength - method.strength / z) / abs(z - 1)


def best(method: Method) -> tuple[float, float]:
    """(h, rate) with the best rate for one eigenvalue, on a grid refined three times."""
    low, high = 1e-4, stability_limit(method)
    for _ in range(3):
        grid = np.linspace(low, high, 400)
        i = int(rates(method, grid).argmin())
        low, high = float(grid[max(i - 1, 0)]), float(grid[min(i + 1, 399)])
    h = (low + high) / 2
    return h, rate(method, h)


@cache
def tuned_updates(methods: tuple[Method, ...], condition_number: float, points: int = 500) -> float:
    """Updates per factor e, for eigenvalues lambda_max / condition_number .. lambda_max, best of methods and steps."""
    grid = np.geomspace(1e-6, 200, points)
    width = round(math.log(condition_number) / math.log(grid[1] / grid[0]))
    smallest = 1.0
    for method in methods:
        windows = np.lib.stride_tricks.sliding_window_view(rates(method, grid), width + 1)
        smallest = min(smallest, float(windows.max(1).min()))
    return -1 / math.log(smallest)


def noise_gain(method: Method, h: float, base_trajectory: bool = False) -> float:
    """Stationary variance of W, or of the base trajectory Y, per unit variance of lr * gradient noise.

    A(x) v = xi and W = -(1 - beta) x N(x) v, A the characteristic polynomial in x; the covariance P of
    (v_t, v_{t-1}, ...) solves the Lyapunov equation P = F P F^T + e_1 e_1^T, F the companion matrix of A.
    """
    a = characteristic(method, h)
    output = -(1 - method.beta) * numerator(method, feedback=not base_trajectory)
    n = max(len(a) - 1, len(output))
    f = np.eye(n, k=-1)
    f[0, : len(a) - 1] = -a[1:]
    unit = np.zeros(n * n)
    unit[0] = 1
    p = np.linalg.solve(np.eye(n * n) - np.kron(f, f), unit).reshape(n, n)
    return float(output @ p[: len(output), : len(output)] @ output)


def average_age(method: Method) -> float:
    """Average age of the gradients in a step, in updates (statements 3.4 and 5.2): phi d - s + beta / (1 - beta)."""
    momentum = method.beta / (1 - method.beta) * (method.beta if method.nesterov else 1)
    return method.phi * method.delay - method.strength + momentum


def noise_share(beta: float, nesterov: bool = False) -> float:
    """Sum of the squared weights of the gradients in a step (statements 4.5 and 5.2): its variance per unit noise."""
    return (1 - beta) / (1 + beta) * (1 + 2 * beta - 2 * beta**3 if nesterov else 1)


def delay_limit(delay: int) -> float:
    """Gradient descent with delay d (statement 2.1): 2 sin(pi / (2 (2d + 1)))."""
    return 2 * math.sin(math.pi / (2 * (2 * delay + 1)))


def synchronous_limit(beta: float, nesterov: bool = False) -> float:
    """Momentum without delay (statement 3.1)."""
    return 2 * (1 + beta) / (1 - beta) / (1 + 2 * beta if nesterov else 1)


def momentum_and_delay_limit(theta: float, delay: int) -> tuple[float, float]:
    """Plain momentum, delay d (statement 3.2): (beta, limit) at which the critical root is exp(i theta)."""
    beta = math.cos((delay + 0.5) * theta) / math.cos((delay - 0.5) * theta)
    return beta, math.sin(theta) / math.sin(delay * theta)


def feedback_limit(beta: float, strength: float, phi: float = 1.0) -> float:
    """Plain momentum, staleness phi, Error Feedback of strength s >= 0 (statement 7.1; 3.3 for phi = 1)."""
    a = (1 - beta) * phi * strength * (1 + strength - phi)
    b = phi - strength + (1 - beta) * phi * strength
    root = b + math.sqrt(b * b + 4 * a)  # 2 / root solves a h^2 + b h = 1
    return min(2 / root if root > 1e-12 else math.inf, _alternating_limit(beta, 1 + 2 * strength, phi))


def nesterov_feedback_limit(beta: float, strength: float, phi: float = 1.0) -> float:
    """Nesterov's form, staleness phi, Error Feedback of strength s (statement 7.1), from the margin of the quartic."""
    n = np.convolve([1 - phi, phi], np.convolve([1 + beta, -beta], [1 + strength, -strength]))
    left = np.convolve([1.0, -1.0], [1.0, -beta])[1:]
    a3, a2, a1, a0 = (
        np.polynomial.Polynomial([fixed, (1 - beta) * factor]) for fixed, factor in zip([*left, 0.0, 0.0], n)
    )
    margin = (1 - a0) ** 2 * (1 + a0 - a2) - (a1 - a3) * (a1 - a0 * a3)
    roots = margin.roots()
    positive = roots.real[(np.abs(roots.imag) < 1e-9) & (roots.real > 0)]
    alternating = _alternating_limit(beta, (1 + 2 * beta) * (1 + 2 * strength), phi)
    return float(min([*positive.tolist(), alternating]))


def _alternating_limit(beta: float, numerator_there: float, phi: float) -> float:
    """Where a root reaches -1."""
    return math.inf if phi >= 0.5 else 2 * (1 + beta) / ((1 - beta) * numerator_there * (1 - 2 * phi))
