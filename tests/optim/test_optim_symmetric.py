"""Products that are symmetric: by halves on CPUs and by the Triton kernel what torch's full product gives."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch

from lightning_asyncpp.optim import newton_schulz
from lightning_asyncpp.optim.newton_schulz import full_product, symmetric_product

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
STRIP = 32  # rows


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [5, 3 * STRIP, 3 * STRIP + 1])
@pytest.mark.parametrize("transposed", [True, False])
@patch.object(newton_schulz, "STRIP_ROWS", dict.fromkeys(DTYPES, STRIP))
def test_equals_the_full_product(dtype: torch.dtype, rows: int, transposed: bool) -> None:
    x = random(2, 70, rows, dtype=dtype).mT if transposed else random(2, rows, 70, dtype=dtype)
    x = x / rows**0.5
    gram, expected = (torch.empty(2, rows, rows, dtype=dtype) for _ in range(2))
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
    assert symmetric_product(x, x.mT, gram) is gram
    torch.testing.assert_close(gram, full_product(x, x.mT, expected), rtol=tolerance, atol=tolerance)
    product = symmetric_product(gram, gram, torch.empty_like(gram), gram, beta=-0.3, alpha=0.7)
    full_product(gram, gram, expected, gram, beta=-0.3, alpha=0.7)
    torch.testing.assert_close(product, expected, rtol=tolerance, atol=tolerance)


INTERPRETED = """
import torch
from lightning_asyncpp.optim import symmetric_triton as kernel
from lightning_asyncpp.optim.newton_schulz import full_product

torch.set_num_threads(1)
kernel.BLOCK, kernel.BLOCK_INNER = 32, 16
for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 2e-3)):  # the interpreter's bfloat16 products are wrong
    for rows, columns in ((64, 64), (70, 33), (31, 50), (1, 3)):
        x = torch.randn(2, rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype) / columns**0.5
        for a in (x, x.mT.contiguous().mT):
            gram, product = torch.full((2, 2, rows, rows), float("nan"), dtype=dtype)
            kernel.triton_symmetric_product(a, a.mT, gram, None, 0.0, 1.0)
            expected = full_product(a, a.mT, torch.empty_like(gram))
            torch.testing.assert_close(gram, expected, rtol=tolerance, atol=tolerance)
            kernel.triton_symmetric_product(gram, gram, product, gram, -0.3, 0.7)
            expected = full_product(gram, gram, torch.empty_like(gram), gram, -0.3, 0.7)
            torch.testing.assert_close(product, expected, rtol=tolerance, atol=tolerance)
"""


@needs_triton
@pytest.mark.slow
def test_the_kernel_interpreted_on_a_cpu_equals_the_full_product() -> None:
    """In a process of its own: Triton reads its variables once, and keeps what it compiled in a cache."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", INTERPRETED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_triton
def test_where_the_kernel_cannot_run_full_products_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device, which stands for a GPU here; it is tried once."""
    from lightning_asyncpp.optim import symmetric_triton

    launches = []

    def fails(*_: object) -> torch.Tensor:
        launches.append(1)
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(newton_schulz, "_without_kernel", set())
    monkeypatch.setattr(newton_schulz, "_may_have_kernel", lambda *_: True)
    monkeypatch.setattr(symmetric_triton, "triton_symmetric_product", fails)
    x, out = (torch.empty(2, 512, columns, dtype=torch.bfloat16, device="meta") for columns in (700, 512))
    with pytest.warns(UserWarning, match="cannot run on meta .*computes full products there"):
        assert symmetric_product(x, x.mT, out) is out
    assert symmetric_product(x, x.mT, out) is out
    assert len(launches) == 1
