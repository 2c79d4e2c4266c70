"""A model that hands numbers of two bytes from layer to layer, a dtype that NCCL does not know."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.helpers.cases import DIM

Pair = tuple[Tensor, Tensor]


class Numbered(nn.Module):
    """Adds an embedding of the numbers that it is given, and hands the next ones on."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, DIM)

    def forward(self, given: Tensor | Pair) -> Pair:
        x, numbers = given if isinstance(given, tuple) else (given, torch.arange(len(given), dtype=torch.int16) % 8)
        return torch.tanh(x + self.embedding(numbers.long())), (numbers + 1) % 8


class Last(nn.Linear):
    """Has no use for the numbers."""

    def forward(self, given: Pair) -> Tensor:  # type: ignore[override]
        return super().forward(given[0])


def with_short_numbers(dropout: float) -> nn.Sequential:
    """Five layers, so that it can be cut into as many stages."""
    torch.manual_seed(12)
    return nn.Sequential(*[Numbered() for _ in range(4)], Last(DIM, 1))
