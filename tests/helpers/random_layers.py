"""Layers to put together at random: what they pass on, share, freeze and count differs from one to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_asyncpp.core.tree import children_of
from tests.helpers.cases import DIM, Experts, Projection, Routed, Spare

FORMS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x, x * 0.5, x.detach() > 0, torch.arange(x.shape[1], dtype=torch.int32)),
    "list": lambda x: [x, [None, (x.detach().sign().to(torch.int8),)], torch.zeros(0)],
    "dict": lambda x: {"text": "a", "x": x, "none": None, "flag": True, "rest": {"n": 3, "y": x * 0.25, "e": 1e-3}},
    "twice": lambda x: (x, x),
    "strided": lambda x: (x.t().contiguous().t(), (x * 2)[:, ::2]),
    "half": lambda x: (x, x.detach().double(), x.to(torch.bfloat16), torch.tensor(0.5)),
}
"""What a layer may return; the next one makes one tensor of it."""

KINDS = ("linear", "projection", "experts", "routed", "spare", "frozen", "half frozen", "no parameters", "inside")
SHARED = ("as first", "as last", "same module", "same dropout")
"""Linear layers that share a weight with the first or the last one before them, or are the first one again; and one
dropout layer that stands in several places."""


class Inside(nn.Module):
    """Two layers that share a weight between themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Layer(nn.Module):
    """Makes a tensor of what comes, applies a module and returns the result in some form."""

    def __init__(self, inner: nn.Module, form: str) -> None:
        super().__init__()
        self.inner, self.form = inner, form

    def forward(self, given: Any) -> Any:
        return FORMS[self.form](self.inner(one_tensor(given)))


def one_tensor(given: Any) -> Tensor:
    """Some function of everything that came, whose order of sums does not depend on what came beside."""
    leaves = list(leaves_of(given))
    x = leaves.pop(next(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)))
    for other in leaves:
        if isinstance(other, Tensor):
            value = other.to(x.dtype)
            x = x + 0.1 * (value if value.shape == x.shape else value.contiguous().sum())
        elif isinstance(other, (bool, int, float)):
            x = x * (1 + 0.01 * other)
    return x.contiguous()


def leaves_of(tree: Any) -> Iterator[Any]:
    if isinstance(tree, Tensor) or not isinstance(tree, (tuple, list, dict)):
        yield tree
    else:
        for child in children_of(tree):
            yield from leaves_of(child)


def make(layers: tuple[tuple[str, str], ...], dropout: float) -> nn.Sequential:
    """A model of one layer for each (kind, form), and one that makes a number of each sample."""
    torch.manual_seed(12)
    linears: list[nn.Linear] = []
    same = nn.Dropout(dropout)
    made: list[Any] = []
    for kind, form in layers:
        if kind == "same dropout":
            made += [Layer(nn.Identity(), "tensor"), same]
        else:
            made.append(Layer(_inner(kind, linears, dropout), form))
    return nn.Sequential(*made, Layer(nn.Linear(DIM, 1), "tensor"))


def _inner(kind: str, linears: list[nn.Linear], dropout: float) -> nn.Module:
    if kind == "same module":
        return linears[0]
    if kind in ("projection", "experts", "routed", "spare", "no parameters", "inside"):
        return {
            "projection": Projection, "experts": lambda: Experts(dropout), "routed": Routed, "spare": Spare,
            "no parameters": nn.Tanh, "inside": Inside,
        }[kind]()  # fmt: skip
    linear = nn.Linear(DIM, DIM)
    if kind in ("as first", "as last"):
        linear.weight = linears[0 if kind == "as first" else -1].weight
    if kind == "frozen":
        return linear.requires_grad_(False)
    if kind == "half frozen":
        linear.bias.requires_grad_(False)
    linears.append(linear)
    return linear
