"""Finding the units of a model, spreading them over stages, and refusing what a pipeline cannot train."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_asyncpp.core.cut.partition import uniform
from lightning_asyncpp.core.cut.units import (
    Unit,
    apply_layers,
    collective_problems,
    has_parameters,
    meta_problems,
    ownership_problems,
    pipeline_units,
)
from lightning_asyncpp.errors import ConfigurationError


class Layered(nn.Module):
    """A model of its own kind, whose layers are nested and not registered in the order in which they run."""

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


def test_layers_keep_their_names_in_the_model() -> None:
    model = Layered()
    units = pipeline_units(model)
    assert [unit.name for unit in units] == ["embedding", "body.blocks.0", "body.blocks.1", "head"]
    assert all(model.get_submodule(unit.name) is unit.module for unit in units)


def test_a_model_that_cannot_be_cut() -> None:
    with pytest.raises(ConfigurationError) as caught:
        pipeline_units(nn.Linear(2, 2))
    assert str(caught.value) == (
        "the model is a Linear, which the pipeline cannot cut: make it an nn.Sequential, or give it pipeline_layers(),"
        " a method that returns its layers in the order in which they are applied"
    )


def test_a_layer_may_be_applied_by_a_function() -> None:
    def scaled(layer: nn.Module, x: torch.Tensor, *, scale: float) -> torch.Tensor:
        return scale * layer(x)

    model = Layered(lambda m: [(m.embedding, scaled), (m.head, lambda head, x: head(x.relu()))])
    assert [unit.name for unit in pipeline_units(model)] == ["embedding", "head"]
    x = torch.randn(5, 3)
    assert torch.equal(apply_layers(model, x, scale=2.0), model.head((2.0 * model.embedding(x)).relu()))
    assert torch.equal(apply_layers(nn.Sequential(model.embedding, model.head), x), model.head(model.embedding(x)))


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        (lambda m: [], "it is empty"),
        (lambda m: [m.embedding, nn.Linear(1, 1)], "it holds something that is not a submodule of the model"),
        (lambda m: [m.embedding, "head"], "it holds something that is not a submodule of the model"),
        (lambda m: [m], "it holds something that is not a submodule of the model"),
        (lambda m: [m.head, m.head], "it holds a layer twice"),
        (lambda m: [m.embedding, (m.head, "call")], "the second of a pair is not a function"),
        (
            lambda m: [m.head, m.head, 3],
            "it holds something that is not a submodule of the model and it holds a layer twice",
        ),
    ],
    ids=["empty", "stranger", "text", "itself", "twice", "no function", "both"],
)
def test_wrong_layers(layers: Any, problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        pipeline_units(Layered(layers))
    expected = f"Layered.pipeline_layers() must return distinct submodules of the model in order: {problem}"
    assert str(caught.value) == expected


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
    assert problems[0].startswith(
        "parameters outside the layers of self.model: temperature, model.body.blocks.0.weight, "
        "model.body.blocks.0.bias, model.body.blocks.1.weight, model.body.blocks.1.bias; the pipeline trains only what"
    )
    assert ownership_problems(root.model.head, [Unit("head", root.model.head)]) == []


def test_layers_that_would_wait_for_other_stages() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.SyncBatchNorm(2)), nn.SyncBatchNorm(2))
    (problem,) = collective_problems(pipeline_units(model))
    assert problem.startswith("SyncBatchNorm (1.1, 2) synchronises over all ranks, most of which hold other layers")
    assert collective_problems(pipeline_units(model[:1])) == []


def test_meta_tensors_outside_the_layers() -> None:
    with torch.device("meta"):
        model = Layered(lambda m: [m.embedding, m.head])
        model.register_buffer("scale", torch.ones(1))
    model.body.requires_grad_(False)
    (problem,) = meta_problems(model, pipeline_units(model))
    assert problem.startswith("meta tensors outside the layers of the model: body.blocks.0.weight, body.blocks.0.bias,")
    assert "body.blocks.1.bias, scale; no stage would give them a value" in problem
    model.body, model.scale = nn.Module(), torch.ones(1)
    assert meta_problems(model, pipeline_units(model)) == []
