"""Both ways to multiply groups of rows by their own weights equal a plain loop, in outputs and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_asyncpp.models import grouped_linear as module
from lightning_asyncpp.models.grouped_linear import grouped_linear, serves_grouped

CPU = torch.device("cpu")
COUNTS = [[3, 0, 5, 3], [0, 0, 11, 0], [11, 0, 0, 0], [2, 3, 3, 3]]


def operands(counts: list[int], dtype: torch.dtype, width: int = 16, out: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(counts), width, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(len(counts), out, width, generator=generator).to(dtype).requires_grad_()
    return x, weight, torch.tensor(counts).cumsum(0).to(torch.int32)


def written_out(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    counts = ends.diff(prepend=torch.zeros(1, dtype=torch.int32)).tolist()
    return torch.cat([F.linear(rows, matrix) for rows, matrix in zip(x.split(counts), weight)])


def all_results(counts: list[int], dtype: torch.dtype, how: object) -> list[Tensor]:
    x, weight, ends = operands(counts, dtype)
    y = how(x, weight, ends)  # type: ignore[operator]
    gradient = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    return [y, *torch.autograd.grad(y, (x, weight), gradient)]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grouped", [True, False])
def test_equals_the_loop_written_out(counts: list[int], dtype: torch.dtype, grouped: bool) -> None:
    if grouped and not serves_grouped(CPU, dtype, 16, 24):
        pytest.skip("this torch has no grouped matmul here")
    expected = all_results(counts, dtype, written_out)
    found = all_results(counts, dtype, lambda *args: grouped_linear(*args, grouped))
    tolerance = 4 * torch.finfo(dtype).eps
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.detach().abs().max()))


def test_what_grouped_matmul_refuses_goes_to_the_loop() -> None:
    assert serves_grouped(CPU, torch.bfloat16, 16, 24)
    assert not serves_grouped(CPU, torch.float32, 7, 24)  # rows of 28 bytes
    assert not serves_grouped(CPU, torch.bfloat16, 16, 20)


@pytest.mark.parametrize("wrong", ["forward", "empty group", "nan", "refuses"])
def test_a_grouped_matmul_that_errs_is_not_used(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = F.grouped_mm

    def grouped_mm(x: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
        if wrong == "refuses":
            raise RuntimeError("not on this device")
        if wrong == "forward":
            return right(x, weight, offs=offs) * 1.5
        if wrong == "empty group":
            weight = weight.clone()
            weight.register_hook(lambda gradient: gradient + (offs.diff(prepend=offs[:1] * 0) == 0).view(-1, 1, 1))
        result = right(x, weight, offs=offs)
        return result * float("nan") if wrong == "nan" else result

    monkeypatch.setattr(F, "grouped_mm", grouped_mm)
    module._trial.cache_clear()
    try:
        assert not serves_grouped(CPU, torch.bfloat16, 16, 24)  # all supported torch versions serve this dtype
    finally:
        module._trial.cache_clear()
