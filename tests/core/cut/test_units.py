"""The units of a model are found and spread over stages; models that a pipeline cannot train are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_asyncpp.core.cut.partition import uniform
from lightning_asyncpp.core.cut.units import Unit, has_parameters, ownership_problems, pipeline_units
from lightning_asyncpp.errors import ConfigurationError


class Layered(nn.Module):
    """Model whose ``pipeline_layers()`` are nested, and not registered in the order in which they run."""

    def __init__(self, layers: Any = None) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.body = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])})
        self.embedding = nn.Linear(3, 4)
        self.returned = layers

    def pipeline_layers(self) -> Any:
        if self.returned is not None:
            return self.returned(self)
        return [self.embedding, *self.body["blocks"], self.head]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.pipeline_layers():
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        (lambda m: [], "the list is empty"),
        (lambda m: [m.embedding, nn.Linear(1, 1)], "the list holds something that is not a submodule of the model"),
        (lambda m: [m.head, m.head], "the list holds a layer twice"),
        (lambda m: [m.embedding, (m.head, "call")], "the second entry of a pair is not a function"),
    ],
    ids=["empty", "stranger", "twice", "no function"],
)
def test_wrong_layers(layers: Any, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        pipeline_units(Layered(layers))


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(1, 8))
def test_units_are_spread_evenly(heavy: list[bool], num_stages: int) -> None:
    units = [Unit(str(i), nn.Linear(1, 1) if h else nn.GELU()) for i, h in enumerate(heavy)]
    if sum(heavy) < num_stages:
        with pytest.raises(ConfigurationError, match=f"has {sum(heavy)} layers with parameters, fewer than the"):
            uniform(list(map(has_parameters, units)), num_stages)
        return
    counts = uniform(list(map(has_parameters, units)), num_stages)
    assert sum(counts) == len(units)
    ends = [sum(counts[: stage + 1]) for stage in range(num_stages)]
    parts = [heavy[end - count : end] for end, count in zip(ends, counts)]
    sizes = [sum(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    assert all(part[0] for part in parts[1:]), "a layer without parameters opens a stage"


def test_parameters_outside_the_layers() -> None:
    root = nn.Module()
    root.model = Layered(lambda m: [m.embedding, m.head])
    root.temperature = nn.Parameter(torch.ones(1))
    problems = ownership_problems(root, pipeline_units(root.model))
    assert len(problems) == 1
    assert "outside the layers of self.model: temperature, model.body.blocks.0.weight" in problems[0]
    assert ownership_problems(root.model.head, [Unit("head", root.model.head)]) == []
