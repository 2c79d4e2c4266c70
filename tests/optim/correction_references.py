"""Plain references of what every correction does, the small trainings that they are compared on, and all cases."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from lightning_asyncpp.optim import (
    ErrorFeedback,
    MuonAdamW,
    WeightPrediction,
)

SHAPES = {"up.weight": (6, 4), "up.bias": (6,), "embed.weight": (5, 4), "scale": ()}
BASES = {
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "muon": partial(MuonAdamW, lr=0.02, newton_schulz_dtype="float32"),
}
STEPS = 7


def make_params():
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def gradients(weights, step):
    """Gradients that depend on the weights, so that a wrong weight shows."""
    noise = [
        torch.randn(w.shape, generator=torch.Generator().manual_seed(100 * step + i)) for i, w in enumerate(weights)
    ]
    return [w.sin() + n for w, n in zip(weights, noise)]


def train(optimizer, params, steps):
    for step in steps:
        for p, g in zip(params.values(), gradients([p.detach() for p in params.values()], step)):
            p.grad = g
        optimizer.step()


def base_step(base, params, weights, grads):
    """u_t: what the base subtracts from ``weights``."""
    for p, w, g in zip(params.values(), weights, grads):
        p.data.copy_(w)
        p.grad = g.clone()
    base.step()
    return [w - p.detach() for w, p in zip(weights, params.values())]


def predict(base, params, steps, delay, horizon=None, ahead=0.0):
    weights = [p.detach().clone() for p in params.values()]
    y = [w.clone() for w in weights]
    for t in steps:
        u = base_step(base, params, weights, gradients(weights, t))
        y = [a - b for a, b in zip(y, u)]
        weights = [a - (ahead + (delay if delay == 0 or horizon is None else horizon)) * b for a, b in zip(y, u)]
    return weights


def feed_back(base, params, steps, delay, strength=1.0):
    weights = [p.detach().clone() for p in params.values()]
    previous = None
    for t in steps:
        u = base_step(base, params, weights, gradients(weights, t))
        s = 0.0 if previous is None else strength
        weights = [w - (a + s * (a - b)) for w, a, b in zip(weights, u, previous or u)]
        previous = u
    return weights


CASES = {
    "feedback": (ErrorFeedback, feed_back, {"strength": 1.5}),
    "prediction": (WeightPrediction, predict, {}),
    "prediction-2.5": (WeightPrediction, predict, {"horizon": 2.5}),
    "prediction-ahead": (WeightPrediction, predict, {"ahead": 1.5}),
}
STOPS_WITHOUT_DELAY = [case for case in CASES if case != "prediction-ahead"]
