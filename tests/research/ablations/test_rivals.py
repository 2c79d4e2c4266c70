"""Corrections of others against plain references of their formulas."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from research.ablations import rivals

STEPS, LR = 7, 0.05
BASE = partial(torch.optim.SGD, lr=LR)


def gradient(weights: Tensor, step: int) -> Tensor:
    """A gradient that depends on the weights, so that a wrong weight shows."""
    return weights.sin() + torch.randn(
        weights.shape, generator=torch.Generator().manual_seed(step), dtype=weights.dtype
    )


def look_ahead(w: Tensor, momentum: float, momentum_decay: float) -> Tensor:
    c = [momentum * (1 - 0.5 * 0.96 ** (t * momentum_decay)) for t in range(STEPS + 2)]
    y = w
    for t in range(STEPS):
        following = w - (1 - c[t + 1]) * LR * gradient(w, t)
        w, y = following + c[t + 2] * (following - y), following
    return w


def discount(w: Tensor, anneal_steps: int, staleness: float) -> Tensor:
    for t in range(STEPS):
        w = w - LR * gradient(w, t) / staleness ** (1 - min(t / anneal_steps, 1))
    return w


def compensate(w: Tensor, strength: float, adaptive: bool = False, decay: float = 0.95) -> Tensor:
    older, q = w, torch.zeros_like(w)
    for t in range(STEPS):
        g = gradient(w, t)
        q = decay * q + (1 - decay) * g * g
        k = strength / (q + 1e-7).sqrt() if adaptive else strength
        w, older = w - LR * (g + k * g * g * (w - older)), w
    return w


def extrapolate(w: Tensor, strength: float) -> Tensor:
    previous = None
    for t in range(STEPS):
        g = gradient(w, t)
        w = w - LR * (g if previous is None else g + strength * (g - previous))
        previous = g
    return w


@pytest.mark.parametrize(
    ("name", "reference", "options"),
    [
        ("NesterovLookAhead", look_ahead, {"momentum": 0.9, "momentum_decay": 0.5}),
        ("LearningRateDiscount", discount, {"anneal_steps": 4, "staleness": 3.0}),
        ("DelayCompensation", compensate, {"strength": 3.0}),
        ("DelayCompensation", compensate, {"strength": 3.0, "adaptive": True, "decay": 0.5}),
        ("GradientExtrapolation", extrapolate, {"strength": 0.7}),
    ],
)
def test_formula(name: str, reference: Callable[..., Tensor], options: dict[str, Any]) -> None:
    start = torch.linspace(-1, 1, 6, dtype=torch.float64)
    p = nn.Parameter(start.clone())
    optimizer = getattr(rivals, name)([p], BASE, **options)
    for step in range(STEPS):
        p.grad = gradient(p.detach(), step)
        optimizer.step()
    torch.testing.assert_close(p.detach(), reference(start, **options))
    assert optimizer.param_groups is optimizer.base.param_groups
