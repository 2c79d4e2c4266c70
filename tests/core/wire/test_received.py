"""A received tensor behaves as one that a layer before made, and its gradient arrives."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_asyncpp.core.wire.transport import arrived_at, begin


def add_in_place(x: Tensor) -> Tensor:
    x += x.detach().sum()
    return x * 2


def relu_in_place(x: Tensor) -> Tensor:
    return nn.ReLU(inplace=True)(x) * 3


def rows_in_place(x: Tensor) -> Tensor:
    x[0].mul_(5)
    x[1:, 0] = 0
    return x


def used_twice(x: Tensor) -> Tensor:
    return x * 2 + x.square()


def untouched(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize("layer", [add_in_place, relu_in_place, rows_in_place, used_twice, untouched])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_is_that_of_a_tensor_in_the_middle_of_a_graph(
    layer: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    values = torch.randn(3, 4).to(dtype)
    leaf = values.clone().requires_grad_()
    expected = layer(leaf * 1)
    tensor, gradient = begin(values.clone())
    output = layer(tensor)
    seed = torch.randn(3, 4).to(dtype)
    expected.backward(seed)
    output.backward(seed)
    assert leaf.grad is not None
    assert torch.equal(output, expected)
    assert torch.equal(arrived_at(gradient), leaf.grad)


def test_the_memory_is_shared_and_nothing_is_copied() -> None:
    arrived = torch.ones(2, 2)
    tensor, _ = begin(arrived)
    tensor.mul_(7)
    assert arrived.data_ptr() == tensor.data_ptr()


def test_what_nothing_depends_on_has_a_gradient_of_zeros() -> None:
    tensor, gradient = begin(torch.ones(2, 3, dtype=torch.bfloat16))
    assert tensor.requires_grad
    assert torch.equal(arrived_at(gradient), torch.zeros(2, 3, dtype=torch.bfloat16))


def test_the_tensor_goes_when_its_graph_does() -> None:
    tensor, gradient = begin(torch.ones(2))
    gone = weakref.ref(tensor)
    (tensor * 2).sum().backward()
    del tensor
    gc.collect()
    assert gone() is None
    assert torch.equal(arrived_at(gradient), torch.full((2,), 2.0))
