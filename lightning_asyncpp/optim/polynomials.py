"""The odd quintic polynomials that Newton-Schulz iterations apply to the singular values, one per step."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

Quintic = tuple[float, float, float]
"""a, b, c of x -> a x + b x^3 + c x^5."""

COEFFICIENTS: Quintic = (3.4445, -4.7750, 2.0315)
"""Maximise the slope at zero: singular values land in about [0.7, 1.2] after 5 steps, not exactly on 1."""

POLYNOMIALS = ("quintic", "polar_express")

LOWER_BOUND = 1e-3
"""Singular values from here up to 1 are what :func:`polar_express` is best for; the authors' choice for bfloat16."""

CUSHION = 0.02407327424182761
"""A step is best for no wider an interval than from this share of its upper end: a steeper polynomial would bring large
singular values close to 0, where rounding takes over. With this value the coefficients are the published ones."""

SAFETY = 1.01
"""Room for rounding above the largest singular value in all steps but the last, as published."""


def quintics(kind: str, steps: int, coefficients: Quintic = COEFFICIENTS) -> tuple[Quintic, ...]:
    """Return the polynomials of all steps.

    Args:
        kind: "quintic": ``coefficients`` at every step, by default those of Jordan et al. 2024; "polar_express".
        steps: how many.
        coefficients: of "quintic".

    Raises:
        ValueError: there is no such kind.
    """
    if kind == "quintic":
        return (coefficients,) * steps
    if kind == "polar_express":
        return polar_express(steps)
    raise ValueError(f"newton_schulz must be one of {', '.join(POLYNOMIALS)}, got {kind!r}")


@lru_cache
def polar_express(steps: int, lower: float = LOWER_BOUND) -> tuple[Quintic, ...]:
    """Compute the composition of quintics that brings all of [lower, 1] closest to 1, step by step.

    Source: "The Polar Express", arXiv 2505.16932, Theorem 4.1: the best composition is greedy, each polynomial the best
    one on the interval that the one before it leaves, which is symmetric about 1. Computed here by Remez' algorithm.

    Args:
        steps: how many polynomials.
        lower: smallest singular value to care for, over the largest.

    Raises:
        ValueError: ``lower`` is not in (0, 1].
    """
    if not 0 < lower <= 1:
        raise ValueError(f"lower must be above 0 and at most 1, got {lower!r}")
    upper, result = 1.0, []
    for step in range(steps):
        a, b, c = best_quintic(max(lower, CUSHION * upper), upper)
        # With the cushion `lower` is mapped lower than the interval's end: both ends are brought around 1 again.
        low, high = (t * (a + t * t * (b + t * t * c)) for t in (lower, upper))
        scale = 2 / (low + high)
        lower, upper = scale * low, scale * high
        room = SAFETY if step + 1 < steps else 1.0
        result.append((scale * a / room, scale * b / room**3, scale * c / room**5))
    return tuple(result)


def best_quintic(lower: float, upper: float) -> Quintic:
    """Return the odd quintic p with the smallest maximum of |1 - p| on [lower, upper], 0 < lower <= upper.

    Its error has the same size and alternating signs at both ends and at its two extrema between them (arXiv
    2505.16932, appendix D); Remez' algorithm takes turns between the error and the extrema.
    """
    if lower > (1 - 1e-5) * upper:  # too narrow to tell points apart; the limit is the Taylor polynomial of 1/x
        return 15 / (8 * upper), -10 / (8 * upper**3), 3 / (8 * upper**5)
    inner = [(3 * lower + upper) / 4, (lower + 3 * upper) / 4]
    a = b = c = 0.0
    for _ in range(100):
        points = torch.tensor([lower, *inner, upper], dtype=torch.float64)
        signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
        system = torch.stack([points, points**3, points**5, signs], dim=1)
        a, b, c, _ = torch.linalg.solve(system, torch.ones_like(points)).tolist()
        root = math.sqrt(max(0.0, 9 * b * b - 20 * a * c))  # p' = a + 3 b x^2 + 5 c x^4
        extrema = sorted(math.sqrt((-3 * b + sign * root) / (10 * c)) for sign in (-1, 1))
        if max(abs(new - old) for new, old in zip(extrema, inner)) < 1e-14:
            break
        inner = extrema
    return a, b, c
