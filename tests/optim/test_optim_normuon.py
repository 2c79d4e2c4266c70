"""NorMuonAdamW against the paper's listing, and in what it must agree with MuonAdamW."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lightning_asyncpp.optim import NorMuonAdamW
from lightning_asyncpp.optim.newton_schulz import orthogonalize

LR, DECAY, MOMENTUM, BETA2, EPS = 0.05, 0.2, 0.9, 0.8, 1e-10
EXACT = {"newton_schulz_dtype": "float64"}


def gradients(shape, steps=5):
    generator = torch.Generator().manual_seed(sum(shape))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(steps)]


def start(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(99), dtype=torch.float64)


def run(shape, grads, **options):
    p = nn.Parameter(start(shape))
    optimizer = NorMuonAdamW([("up.weight", p)], lr=LR, weight_decay=DECAY, momentum=MOMENTUM, **EXACT, **options)
    for grad in grads:
        p.grad = grad.clone()
        optimizer.step()
    return p.detach()


def reference(shape, grads, nesterov, adjust_lr):
    """Algorithm 1 of arXiv 2510.05491; "original" is the scale of the authors' code."""
    rows, columns = shape
    w, m, v = start(shape), torch.zeros(shape, dtype=torch.float64), torch.zeros(rows, dtype=torch.float64)
    for g in grads:
        m = MOMENTUM * m + (1 - MOMENTUM) * g
        o = orthogonalize([((1 - MOMENTUM) * g + MOMENTUM * m if nesterov else m)[None]], dtype=torch.float64)[0]
        v = BETA2 * v + (1 - BETA2) * (o * o).mean(dim=1)
        n = o / (v.sqrt() + EPS)[:, None]
        if adjust_lr == "match_rms_adamw":
            n = 0.2 * math.sqrt(rows * columns) / n.norm() * n
        else:
            n = o.norm() / n.norm() * n * math.sqrt(max(1, rows / columns))
        w = w - LR * DECAY * w - LR * n
    return w


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (5, 5)])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr", ["match_rms_adamw", "original"])
def test_the_papers_listing(shape, nesterov, adjust_lr):
    grads = gradients(shape)
    result = run(shape, grads, beta2=BETA2, nesterov=nesterov, adjust_lr=adjust_lr)
    torch.testing.assert_close(result, reference(shape, grads, nesterov, adjust_lr), rtol=0, atol=1e-12)
