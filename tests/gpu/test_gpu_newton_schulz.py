"""On one NVIDIA GPU, Newton-Schulz agrees with that of a CPU, and MuonAdamW with torch.optim.Muon."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_asyncpp.optim import MuonAdamW
from lightning_asyncpp.optim.newton_schulz import orthogonalize

CUDA = torch.device("cuda")


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(CUDA)


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
        assert (p - q).norm() < 0.03 * (q - start).norm()  # a few bfloat16 roundings, relative to the whole step
