"""NorMuonAdamW against the paper's listing, and in what it must agree with MuonAdamW."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lightning_asyncpp.optim import MuonAdamW, NorMuonAdamW
from lightning_asyncpp.optim.newton_schulz import orthogonalize

LR, DECAY, MOMENTUM, BETA2, EPS = 0.05, 0.2, 0.9, 0.8, 1e-10
EXACT = {"newton_schulz_dtype": "float64"}


def gradients(shape, steps=5):
    generator = torch.Generator().manual_seed(sum(shape))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(steps)]


def start(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(99), dtype=torch.float64)


def run(shape, grads, make=NorMuonAdamW, **options):
    p = nn.Parameter(start(shape))
    optimizer = make([("up.weight", p)], lr=LR, weight_decay=DECAY, momentum=MOMENTUM, **EXACT, **options)
    for grad in grads:
        p.grad = grad.clone()
        optimizer.step()
    return p.detach(), optimizer


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
    result, _ = run(shape, grads, beta2=BETA2, nesterov=nesterov, adjust_lr=adjust_lr)
    torch.testing.assert_close(result, reference(shape, grads, nesterov, adjust_lr), rtol=0, atol=1e-12)


def test_an_update_has_the_published_size_and_evens_out_the_neurons():
    grads = gradients((6, 4), steps=1)
    moved = (run((6, 4), grads)[0] - start((6, 4)) * (1 - LR * DECAY)) / LR
    assert float(moved.square().mean().sqrt()) == pytest.approx(0.2)
    torch.testing.assert_close(moved.norm(dim=1), torch.full((6,), 0.4, dtype=torch.float64))  # 0.2 * sqrt(4)
    muons = (run((6, 4), grads, make=MuonAdamW)[0] - start((6, 4)) * (1 - LR * DECAY)) / LR
    assert float(muons.norm(dim=1).std()) > 0.01  # Muon's neurons differ


@pytest.mark.parametrize("pieces", [1, 2])
def test_experts_are_linear_weights_one_by_one(pieces, monkeypatch):
    monkeypatch.setattr("lightning_asyncpp.optim.muon.BATCH_ELEMENTS", (4 // pieces) * 5 * 7)
    grads = gradients((4, 5, 7))  # (experts, out, in)
    experts, optimizer = run((4, 5, 7), grads)
    (state,) = optimizer.state.values()
    assert state["second_moment_buffer"].shape == (4, 5, 1)
    for i in range(4):
        p = nn.Parameter(start((4, 5, 7))[i].clone())
        linear = NorMuonAdamW([("up", p)], lr=LR, weight_decay=DECAY, momentum=MOMENTUM, **EXACT)
        for grad in grads:
            p.grad = grad[i].clone()
            linear.step()
        assert linear.state[p]["second_moment_buffer"].shape == (5, 1)
        torch.testing.assert_close(experts[i], p.detach(), rtol=0, atol=1e-12)


def test_joined_products_give_the_same_update():
    shapes = [(4, 6), (4, 6), (3, 4, 6), (6, 4)]
    results = []
    for batched in (True, False):
        params = [nn.Parameter(start(shape).float()) for shape in shapes]
        optimizer = NorMuonAdamW([(f"w{i}", p) for i, p in enumerate(params)], batched=batched, **EXACT)
        for step in range(3):
            for p, shape in zip(params, shapes):
                p.grad = gradients(shape)[step].float()
            optimizer.step()
        results.append(params)
    for p, q in zip(*results):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


def test_zero_gradients_give_no_nan():
    result, _ = run((4, 6), [torch.zeros(4, 6, dtype=torch.float64)] * 2)
    torch.testing.assert_close(result, start((4, 6)) * (1 - LR * DECAY) ** 2)


def test_a_row_without_a_gradient_stays_finite():
    grads = gradients((4, 6))
    for grad in grads:
        grad[1] = 0
    result, _ = run((4, 6), grads)
    assert result.isfinite().all()
