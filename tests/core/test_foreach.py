"""Work on many tensors gives bitwise what work on each of them gives, whatever they are."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

from lightning_asyncpp.core import foreach
from lightning_asyncpp.dependencies import PrivateNameError


def tensors(dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [(3, 5), (7,), (), (0, 2), (33, 17)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes for dtype in dtypes]


def test_division() -> None:
    mine, expected = tensors(), [tensor / 0.37 for tensor in tensors()]
    foreach.divide_(mine, 0.37)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(mine, expected, strict=True))


def test_copies() -> None:
    sources = tensors()
    destinations = [torch.zeros_like(source) for source in sources]
    foreach.copy_(destinations, sources)
    assert all(torch.equal(a, b) for a, b in zip(destinations, sources, strict=True))
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(destinations, sources, strict=True) if a.numel())


def test_norms_are_computed_in_the_dtype_that_is_asked_for() -> None:
    given = [*tensors(), torch.full((4,), 1e30)]
    expected = [float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) for tensor in given]
    assert [float(norm) for norm in foreach.norm(given, 2, dtype=torch.float64)] == expected


@pytest.mark.parametrize("name", ["_foreach_div_", "_foreach_copy_", "_foreach_norm"])
def test_a_torch_without_them_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with monkeypatch.context() as patched:
        patched.delattr(torch, name)
        with pytest.raises(PrivateNameError, match=rf"torch 2\S+ has no torch\.{name}, which"):
            importlib.reload(foreach)
    importlib.reload(foreach)
