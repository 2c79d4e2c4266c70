"""Digests of a call's arguments differ where the arguments do, not where they were rounded otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_asyncpp.pipeline.step.model_call import NOT_LOOKED_AT, differ, digest

X = torch.randn(300, 7, generator=torch.Generator().manual_seed(0))
IDS = torch.arange(40).view(5, 8)


def of(*args: Any, **kwargs: Any) -> int:
    return digest(args, kwargs)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (of(X), of(X * 1.01)),
        (of(X), of(-X)),
        (of(X), of(X.t())),
        (of(X), of(X.double())),
        (of(IDS), of(IDS.flip(0))),
        (of(X, 1.0), of(X, 1.1)),
        (of(X, 1), of(X, 2)),
        (of(X, mask=IDS > 3), of(X, mask=IDS > 4)),
        (of(X, mask=None), of(X, mask=True)),
        (of({"a": X, "b": -X}), of({"a": -X, "b": X})),
        (of(X), of(x=X)),
        (of(torch.tensor(float("nan"))), of(torch.tensor(float("inf")))),
    ],
)
def test_other_arguments(one: int, other: int) -> None:
    assert differ(one, other)
    assert differ(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (of(X), of(X.clone())),
        (of(X), of(X * (1 + 1e-6))),
        (of(X.bfloat16() * 3), of((X * 3).bfloat16())),
        (of(X.t()), of(X.t().contiguous())),
        (of(torch.full((9,), float("nan"))), of(torch.full((9,), float("nan")))),
        (of(torch.empty(0, 3), "text", None), of(torch.empty(0, 3), "text", None)),
        (of(torch.empty(3, device="meta")), of(torch.empty(3, device="meta"))),
        (of(object()), of(object())),
    ],
)
def test_the_same_arguments(one: int, other: int) -> None:
    assert not differ(one, other)
    assert NOT_LOOKED_AT not in (one, other)
