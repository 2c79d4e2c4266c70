"""Plain references of what every correction does, the small trainings that they are compared on, and all cases."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from lightning_asyncpp.optim import (
    DelayCompensation,
    ErrorFeedback,
    GradientExtrapolation,
    LearningRateDiscount,
    MuonAdamW,
    NesterovLookAhead,
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


def look_ahead(base, params, steps, delay, momentum=0.99, momentum_decay=0.004):
    def c(t):
        return momentum * (1 - 0.5 * 0.96 ** (t * momentum_decay))

    weights = [p.detach().clone() for p in params.values()]
    y = weights
    for t in steps:
        u = base_step(base, params, weights, gradients(weights, t))
        following = [w - (1 - c(t + 1)) * a for w, a in zip(weights, u)]
        weights = [a + c(t + 2) * (a - b) for a, b in zip(following, y)]
        y = following
    return weights


def discount(base, params, steps, delay, anneal_steps, staleness=None):
    weights = [p.detach().clone() for p in params.values()]
    for t in steps:
        u = base_step(base, params, weights, gradients(weights, t))
        power = 1 - min(t / anneal_steps, 1)
        weights = [w - a / (delay if staleness is None else staleness) ** power for w, a in zip(weights, u)]
    return weights


def compensate(base, params, steps, delay, strength=0.04, adaptive=False, decay=0.95):
    weights = [p.detach().clone() for p in params.values()]
    history, q = [weights], [torch.zeros_like(w) for w in weights]
    for t in steps:
        g = gradients(weights, t)
        q = [decay * a + (1 - decay) * b * b for a, b in zip(q, g)]
        k = [strength / (a + 1e-7).sqrt() if adaptive else strength for a in q]
        older = history[max(t - delay, 0)]
        g = [a + b * a * a * (w - o) for a, b, w, o in zip(g, k, weights, older)]
        u = base_step(base, params, weights, g)
        weights = [w - a for w, a in zip(weights, u)]
        history.append(weights)
    return weights


def extrapolate(base, params, steps, delay, strength=1.0):
    weights = [p.detach().clone() for p in params.values()]
    previous = None
    for t in steps:
        g = gradients(weights, t)
        corrected = g if previous is None else [a + strength * (a - b) for a, b in zip(g, previous)]
        previous = g
        u = base_step(base, params, weights, corrected)
        weights = [w - a for w, a in zip(weights, u)]
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
    "look-ahead": (NesterovLookAhead, look_ahead, {"momentum": 0.9, "momentum_decay": 0.5}),
    "discount": (LearningRateDiscount, discount, {"anneal_steps": 5}),
    "discount-by-3": (LearningRateDiscount, discount, {"anneal_steps": 4, "staleness": 3.0}),
    "compensation": (DelayCompensation, compensate, {"strength": 0.3}),
    "compensation-adaptive": (DelayCompensation, compensate, {"strength": 0.3, "adaptive": True, "decay": 0.5}),
    "extrapolation": (GradientExtrapolation, extrapolate, {"strength": 0.7}),
}
STOPS_WITHOUT_DELAY = [case for case in CASES if case != "prediction-ahead"]
