"""On CPUs, symmetric products are computed by halves, and equal torch's full product."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from lightning_asyncpp.optim import newton_schulz
from lightning_asyncpp.optim.newton_schulz import full_product, symmetric_product

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
