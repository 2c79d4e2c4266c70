"""Examples that users give to ``pipelined``: what they may be, and what an error says of one that does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_asyncpp import pipelined
from lightning_asyncpp.errors import ConfigurationError

DIM = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).relu()


class Net(nn.Module):
    """Blocks after a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = self.first(x) * scale
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(
    "example",
    [torch.randn(2, DIM), (torch.randn(2, DIM),), [torch.randn(2, DIM), 2.0], {"x": torch.randn(2, DIM)}],
    ids=["a tensor", "a tuple", "a list", "a dictionary"],
)
def test_what_an_example_may_be(example: Any) -> None:
    """A tensor is one argument, and not one for each of its rows."""
    assert pipelined(Net(), example).pipeline_layers.blocks == ("blocks.0", "blocks.1", "blocks.2")


@pytest.mark.parametrize(
    ("example", "words"),
    [
        (torch.randn(2, DIM + 1), "called with torch.float32 [2, 5] (RuntimeError: mat1 and mat2 shapes cannot"),
        ({"y": torch.ones(2, dtype=torch.int64)}, "called with {'y': 'torch.int64 [2]'} (TypeError: "),
    ],
    ids=["another shape", "another name"],
)
def test_an_example_that_does_not_fit(example: Any, words: str) -> None:
    model = Net()
    with pytest.raises(ConfigurationError) as caught:
        pipelined(model, example)
    assert words in str(caught.value)
    assert not hasattr(model, "pipeline_layers")
