"""MuonAdamW takes the steps of torch.optim.Muon and torch.optim.AdamW; its products on CPUs are computed by halves."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import nn

from lightning_asyncpp.optim import MuonAdamW, newton_schulz
from lightning_asyncpp.optim.newton_schulz import COEFFICIENTS, full_product, orthogonalize, symmetric_product

ADAMW = {"lr": 0.01, "weight_decay": 0.2, "betas": (0.8, 0.99), "eps": 1e-8}
SHAPES = [(16, 24), (16, 24), (24, 16), (8, 8), (3, 40), (16, 24)]


def matrices(shapes=SHAPES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_gradients(params, step, skip=()):
    for i, p in enumerate(params):
        generator = torch.Generator().manual_seed(1000 * step + i)
        p.grad = None if i in skip else torch.randn(p.shape, generator=generator)


def named(params):
    return [(f"w{i}", p) for i, p in enumerate(params)]


@pytest.mark.parametrize("adjust_lr", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("batched", [True, False])
def test_equals_torch_muon(adjust_lr, nesterov, batched):
    ours, theirs = matrices(), matrices()
    optimizer = MuonAdamW(
        named(ours), lr=0.02, momentum=0.9, nesterov=nesterov, weight_decay=0.3, adjust_lr=adjust_lr, batched=batched
    )
    reference = torch.optim.Muon(
        theirs, lr=0.02, momentum=0.9, nesterov=nesterov, weight_decay=0.3, adjust_lr_fn=adjust_lr
    )
    for step in range(3):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        optimizer.step()
        reference.step()
    for p, q in zip(ours, theirs):
        # Bitwise on the CPUs tried. A CPU that sums bfloat16 products in another order moves an entry by about one
        # bfloat16 rounding of an orthogonal matrix's entries, times lr * 0.2 * sqrt(40), in each of 3 steps.
        torch.testing.assert_close(p, q, rtol=0, atol=3 * 2**-8 * 0.02 * 0.2 * 40**0.5)


@pytest.mark.parametrize("shape", [(16, 24), (24, 16)])
def test_newton_schulz_formula(shape):
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y, (a, b, c) = x / x.norm(dim=(1, 2), keepdim=True), COEFFICIENTS
    for _ in range(5):
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    torch.testing.assert_close(orthogonalize([x], dtype=torch.float64), y, rtol=0, atol=1e-12)


def test_zero_stays_zero_beside_others():
    x = torch.stack([torch.zeros(6, 20), torch.randn(6, 20, generator=torch.Generator().manual_seed(0))])
    result = orthogonalize([x])
    assert result[0].eq(0).all()
    assert result[1].isfinite().all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_update_does_not_depend_on_the_other_matrices(dtype):
    """Pipeline stages hold different subsets of the same matrices: every subset must give the same bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        shapes = [(96, 160), (96, 160), (40, 24), (40, 24), (3, 33, 17), (33, 17)]
        together = matrices(shapes)
        optimizer = MuonAdamW(named(together), newton_schulz_dtype=dtype)
        for step in range(2):
            set_gradients(together, step)
            optimizer.step()
        for i, expected in enumerate(together):
            alone = matrices(shapes)[i]
            single = MuonAdamW([(f"w{i}", alone)], newton_schulz_dtype=dtype)
            for step in range(2):
                alone.grad = torch.randn(shapes[i], generator=torch.Generator().manual_seed(1000 * step + i))
                single.step()
            assert torch.equal(alone, expected), f"matrix {i}"
    finally:
        torch.set_num_threads(before)


def test_equals_torch_adamw():
    shapes = [(7,), (5, 4), (), (2, 3, 3, 3)]
    ours, theirs = matrices(shapes), matrices(shapes)
    names = ["b", "embed.weight", "scale", "conv.weight"]
    optimizer = MuonAdamW(zip(names, ours), lr=9.0, adamw_lr=0.01, adamw_weight_decay=0.2, adamw_betas=(0.8, 0.99))
    reference = torch.optim.AdamW(theirs, fused=True, **ADAMW)
    for step in range(4):
        set_gradients(ours, step, skip=[step])
        set_gradients(theirs, step, skip=[step])
        optimizer.step()
        reference.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs))


@pytest.mark.parametrize("transposed", ["parameter", "gradient", "both", "moment"])
def test_adamw_is_right_for_every_layout(transposed):
    """AdamW's steps do not depend on the layout, although torch's fused step pairs wrong elements if layouts differ."""
    start = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    p, q = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    if transposed in ("parameter", "both"):
        p = nn.Parameter(start.T.contiguous().T)
    optimizer = MuonAdamW([("embed", p)], adamw_lr=0.01, adamw_weight_decay=0.2, adamw_betas=(0.8, 0.99))
    reference = torch.optim.AdamW([q], **ADAMW)
    for step in range(3):
        q.grad = torch.randn(6, 9, generator=torch.Generator().manual_seed(step))
        p.grad = q.grad.T.contiguous().T if transposed in ("gradient", "both") else q.grad.clone()
        optimizer.step()
        reference.step()
        if transposed == "moment":
            optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"].T.contiguous().T
    torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


DTYPES = [torch.float64, torch.float32, torch.bfloat16]
STRIP = 32  # rows


def random(*shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [5, 3 * STRIP, 3 * STRIP + 1])
@pytest.mark.parametrize("transposed", [True, False])
@patch.object(newton_schulz, "STRIP_ROWS", dict.fromkeys(DTYPES, STRIP))
def test_symmetric_products_by_halves_equal_the_full_ones(dtype, rows, transposed):
    x = random(2, 70, rows, dtype=dtype).mT if transposed else random(2, rows, 70, dtype=dtype)
    x = x / rows**0.5
    gram, expected = (torch.empty(2, rows, rows, dtype=dtype) for _ in range(2))
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
    assert symmetric_product(x, x.mT, gram) is gram
    torch.testing.assert_close(gram, full_product(x, x.mT, expected), rtol=tolerance, atol=tolerance)
    product = symmetric_product(gram, gram, torch.empty_like(gram), gram, beta=-0.3, alpha=0.7)
    full_product(gram, gram, expected, gram, beta=-0.3, alpha=0.7)
    torch.testing.assert_close(product, expected, rtol=tolerance, atol=tolerance)
