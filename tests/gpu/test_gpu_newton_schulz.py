"""On one NVIDIA GPU: the Triton kernel against torch's products, and MuonAdamW against torch.optim.Muon."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_asyncpp.optim import MuonAdamW
from lightning_asyncpp.optim.newton_schulz import full_product, has_kernel, orthogonalize, symmetric_product

CUDA = torch.device("cuda")


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(CUDA, dtype)


def needs_kernel(dtype: torch.dtype) -> None:
    if not has_kernel(CUDA, dtype):
        pytest.skip("no triton, or a GPU from before Ampere")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("matrices", "rows", "columns"), [(1, 256, 256), (3, 960, 2560), (2, 321, 1000), (1, 777, 70)])
@pytest.mark.parametrize("transposed", [False, True])
def test_kernel_equals_the_full_product(dtype, matrices, rows, columns, transposed):
    needs_kernel(dtype)
    x = random(matrices, columns, rows, dtype=dtype).mT if transposed else random(matrices, rows, columns, dtype=dtype)
    x = x / columns**0.5
    gram = torch.full((matrices, rows, rows), float("nan"), dtype=dtype, device=CUDA)
    symmetric_product(x, x.mT, gram)
    # Both accumulate in float32 and round once; sums in another order may round the other way.
    tolerance = {torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(gram, full_product(x, x.mT, torch.empty_like(gram)), rtol=tolerance, atol=tolerance)
    product = symmetric_product(gram, gram, torch.full_like(gram, float("nan")), gram, beta=-0.3, alpha=0.7)
    expected = full_product(gram, gram, torch.empty_like(gram), gram, beta=-0.3, alpha=0.7)
    torch.testing.assert_close(product, expected, rtol=tolerance, atol=expected.abs().max().item() * tolerance)


def test_a_matrix_does_not_depend_on_its_batch():
    needs_kernel(torch.bfloat16)
    x = random(3, 300, 700, dtype=torch.bfloat16)
    together = symmetric_product(x, x.mT, x.new_empty(3, 300, 300))
    for one, expected in zip(x, together):
        assert torch.equal(symmetric_product(one[None], one[None].mT, x.new_empty(1, 300, 300))[0], expected)


@pytest.mark.parametrize("shape", [(960, 2560), (2560, 960), (333, 1001)])
def test_orthogonalize_is_that_of_a_cpu(shape):
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    expected = orthogonalize([x], dtype=torch.float32)
    result = orthogonalize([x.to(CUDA)]).cpu().float()
    assert (result - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize("batched", [None, False])
def test_muon_steps_as_torch_does(batched):
    shapes = [(960, 960), (320, 960), (2560, 960), (960, 2560), (960, 960), (333, 1001)]
    ours, theirs = ([nn.Parameter(random(*shape)) for shape in shapes] for _ in range(2))
    optimizer = MuonAdamW([(f"w{i}", p) for i, p in enumerate(ours)], lr=0.02, batched=batched)
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(2):
        for p, q in zip(ours, theirs):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).to(CUDA)
            q.grad = p.grad.clone()
        optimizer.step()
        reference.step()
    for p, q, start in zip(ours, theirs, [random(*shape) for shape in shapes]):
        assert (p - q).norm() < 0.03 * (q - start).norm()  # a few roundings of bfloat16 in the whole step
