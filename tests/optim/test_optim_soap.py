"""SOAP against a few lines that follow the paper's listing, in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_asyncpp.optim import SOAP

STEPS, LR, DECAY, EPS = 7, 0.03, 0.2, 1e-8


def gradients(shape: tuple[int, ...], scale: float = 1.0, steps: int = STEPS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    return [scale * torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(steps)]


def start(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(99), dtype=torch.float64)


def run(make, shape: tuple[int, ...], grads: list[Tensor]) -> Tensor:
    p = nn.Parameter(start(shape))
    optimizer = make([p])
    for grad in grads:
        p.grad = grad.clone()
        optimizer.step()
    return p.detach()


def assert_equal(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


def adam(m: Tensor, v: Tensor, t: int, b1: float, b2: float) -> Tensor:
    return m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + EPS)


@pytest.mark.parametrize("shape", [(), (1, 5), (2, 3, 4, 5)])
def test_what_is_no_matrix_goes_to_adamw(shape):
    grads = gradients(shape)
    adamw = run(lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.7), weight_decay=0.3, fused=True), shape, grads)
    assert_equal(run(lambda p: SOAP(p, lr=0.01, betas=(0.8, 0.7), weight_decay=0.3), shape, grads), adamw)


def soap(grads: list[Tensor], b1: float, b2: float, frequency: int, left: bool, right: bool) -> Tensor:
    """Algorithm 3 of arXiv 2409.11321; the first gradient makes the bases. A side that is not rotated has Q = 1."""
    rows, columns = grads[0].shape
    w, m, v = start((rows, columns)), torch.zeros_like(grads[0]), torch.zeros_like(grads[0])
    # lerp: of the bases' freedom where the first gradient has no extent, rounding errors decide.
    L, R = (torch.zeros_like(x).lerp(x, 1 - b2) for x in (grads[0] @ grads[0].T, grads[0].T @ grads[0]))  # noqa: N806
    ql = torch.linalg.eigh(L)[1].flip(1) if left else torch.eye(rows, dtype=torch.float64)
    qr = torch.linalg.eigh(R)[1].flip(1) if right else torch.eye(columns, dtype=torch.float64)
    for t, g in enumerate(grads[1:], start=1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * (ql.T @ g @ qr) ** 2
        w = w - LR * (ql @ adam(ql.T @ m @ qr, v, t, b1, b2) @ qr.T + DECAY * w)
        L, R = b2 * L + (1 - b2) * g @ g.T, b2 * R + (1 - b2) * g.T @ g  # noqa: N806
        if t % frequency == 0 and left:
            order = torch.diag(ql.T @ L @ ql).argsort(descending=True)
            ql, v = torch.linalg.qr(L @ ql[:, order])[0], v[order]
        if t % frequency == 0 and right:
            order = torch.diag(qr.T @ R @ qr).argsort(descending=True)
            qr, v = torch.linalg.qr(R @ qr[:, order])[0], v[:, order]
    return w


@pytest.mark.parametrize("frequency", [1, 3, 100])
@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (5, 5)])
@pytest.mark.parametrize("longest", [100, 5, 1])  # both sides are rotated, the shorter one, none
def test_soap(shape, frequency, longest):
    grads = gradients(shape, steps=12)
    make = lambda p: SOAP(  # noqa: E731
        p, lr=LR, betas=(0.9, 0.8), weight_decay=DECAY, precondition_frequency=frequency, max_precondition_dim=longest
    )
    left, right = (side <= longest for side in shape)
    if not (left or right):  # nothing to rotate: AdamW, from the first gradient on
        adamw = run(lambda p: torch.optim.AdamW(p, lr=LR, betas=(0.9, 0.8), weight_decay=DECAY), shape, grads)
        assert_equal(run(make, shape, grads), adamw)
    else:
        expected = soap(grads, 0.9, 0.8, frequency, left, right)
        # Directions in which the first gradients have no extent are rotated by what is left of rounding errors.
        torch.testing.assert_close(run(make, shape, grads), expected, rtol=0, atol=1e-9)
