"""NorMuon and SOAP equal short fp64 implementations of the papers' algorithms, and those of another library."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys

import pytest
import torch
from torch import nn

from lightning_asyncpp.optim import SOAP, NorMuonAdamW
from lightning_asyncpp.optim.newton_schulz import orthogonalize

LR, DECAY, MOMENTUM, BETA2 = 0.05, 0.2, 0.9, 0.8


def gradients(shape, steps=7):
    generator = torch.Generator().manual_seed(sum(shape))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(steps)]


def start(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(99), dtype=torch.float64)


def run(make, shape, grads):
    p = nn.Parameter(start(shape))
    optimizer = make([("up.weight", p)])
    for grad in grads:
        p.grad = grad.clone()
        optimizer.step()
    return p.detach()


def assert_equal(result, expected):
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


def normuon(grads, nesterov, adjust_lr):
    """Run Algorithm 1 of arXiv 2510.05491; "original" is the scale of the authors' code."""
    rows, columns = grads[0].shape
    w, m = start((rows, columns)), torch.zeros_like(grads[0])
    v = torch.zeros(rows, dtype=torch.float64)
    for g in grads:
        m = MOMENTUM * m + (1 - MOMENTUM) * g
        o = orthogonalize([((1 - MOMENTUM) * g + MOMENTUM * m if nesterov else m)[None]], dtype=torch.float64)[0]
        v = BETA2 * v + (1 - BETA2) * (o * o).mean(dim=1)
        n = o / (v.sqrt() + 1e-10)[:, None]
        if adjust_lr == "match_rms_adamw":
            n = 0.2 * math.sqrt(rows * columns) / n.norm() * n
        else:
            n = o.norm() / n.norm() * n * math.sqrt(max(1, rows / columns))
        w = w - LR * DECAY * w - LR * n
    return w


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (5, 5)])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr", ["match_rms_adamw", "original"])
def test_normuon(shape, nesterov, adjust_lr):
    grads = gradients(shape)
    options = {"beta2": BETA2, "nesterov": nesterov, "adjust_lr": adjust_lr, "newton_schulz_dtype": "float64"}
    make = lambda p: NorMuonAdamW(p, lr=LR, weight_decay=DECAY, momentum=MOMENTUM, **options)  # noqa: E731
    assert_equal(run(make, shape, grads), normuon(grads, nesterov, adjust_lr))


def adam(m, v, t, b1, b2):
    return m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + 1e-8)


@pytest.mark.parametrize("shape", [(), (1, 5), (2, 3, 4, 5)])
def test_what_is_no_matrix_goes_to_adamw(shape):
    grads = gradients(shape)
    adamw = run(lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.7), weight_decay=0.3, fused=True), shape, grads)
    assert_equal(run(lambda p: SOAP(p, lr=0.01, betas=(0.8, 0.7), weight_decay=0.3), shape, grads), adamw)


def soap(grads, b1, b2, frequency, left, right):
    """Run Algorithm 3 of arXiv 2409.11321; the first gradient sets the bases, and Q = 1 if a side is not rotated."""
    rows, columns = grads[0].shape
    w, m, v = start((rows, columns)), torch.zeros_like(grads[0]), torch.zeros_like(grads[0])
    # Use lerp like SOAP, since rounding errors determine the bases where the first gradient has no extent.
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
@pytest.mark.parametrize("longest", [100, 5, 1])  # rotates both sides, the shorter one, none
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
        # In directions where the first gradients have no extent, rounding errors determine the rotation.
        torch.testing.assert_close(run(make, shape, grads), expected, rtol=0, atol=1e-9)


COMPARE = """
import pytorch_optimizer as library
import torch
from torch import nn
from lightning_asyncpp import optim as ours

torch.set_num_threads(1)
DOUBLE = torch.float64

def run(make, shape, start):
    p = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=DOUBLE))
    optimizer = make([("up.weight", p)] if start == "named" else [p])
    generator = torch.Generator().manual_seed(1)
    for _ in range(12):
        p.grad = torch.randn(shape, generator=generator, dtype=DOUBLE)
        optimizer.step()
    return p.detach()

def compare(name, mine, theirs, shape=(5, 7), start="plain", tolerance=1e-12):
    difference = (run(mine, shape, start) - run(theirs, shape, "plain")).abs().max().item()
    print(name, difference)
    assert difference < tolerance, name

decayed = {"lr": 0.01, "weight_decay": 0.1}
# Without weight decay: the library decays after the step. With eps of 0: there it is not bias corrected.
for frequency, tolerance in ((100, 1e-12), (3, 1e-6)):  # the library's QR is fp32, whatever the weights
    soap = {"lr": 0.01, "eps": 0, "weight_decay": 0, "precondition_frequency": frequency}
    compare("SOAP", lambda p: ours.SOAP(p, **soap), lambda p: library.SOAP(p, **soap), tolerance=tolerance)
# Newton-Schulz in bfloat16 in both, but not the same products.
normuon = lambda p: library.NorMuon([{"params": p, "use_muon": True}], update_scale="match_rms", **decayed)
compare("NorMuon", lambda p: ours.NorMuonAdamW(p, **decayed), normuon, start="named", tolerance=2e-4)
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("pytorch_optimizer") is None, reason="pytorch_optimizer is not installed")
def test_an_independent_implementation():
    """Results agree. The import needs its own process: its classes' names would confuse the command line elsewhere."""
    done = subprocess.run([sys.executable, "-c", COMPARE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
