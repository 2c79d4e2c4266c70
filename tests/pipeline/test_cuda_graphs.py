"""Layers compiled with CUDA graphs are refused where several forwards wait for their backwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_asyncpp.models import GPT, GPTConfig
from lightning_asyncpp.pipeline.cut.units import cuda_graph_problems

CUDA = torch.device("cuda", 0)
NO_GRAPHS = {"mode": "max-autotune-no-cudagraphs"}
WITH_GRAPHS = {"mode": "reduce-overhead"}


def compiled_in_place(**options: Any) -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.compile(**options)
    return layer


def compiled_forward(**options: Any) -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.forward = torch.compile(layer.forward, **options)  # type: ignore[method-assign]
    return layer


def compiled_function(**options: Any) -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.activation = torch.compile(torch.relu, **options)
    return layer


def wrapped(**options: Any) -> nn.Module:
    return torch.compile(nn.Linear(2, 2), **options)  # type: ignore[return-value]


def nested(**options: Any) -> nn.Module:
    return nn.Sequential(nn.ReLU(), compiled_in_place(**options))


def blocks(**options: Any) -> nn.Module:
    config = GPTConfig(vocab_size=8, context_length=4, num_layers=1, dim=8, num_heads=2)
    return GPT(config, compile_blocks=options).blocks[0]


ALL = [compiled_in_place, compiled_forward, compiled_function, wrapped, nested, blocks]


@pytest.mark.parametrize("make", ALL)
def test_they_are_found_however_they_were_compiled(make: Callable[..., nn.Module]) -> None:
    for options in (WITH_GRAPHS, {"options": {"triton.cudagraphs": True}}):
        (problem,) = cuda_graph_problems(nn.Sequential(nn.Tanh(), make(**options)), CUDA)
        assert problem.startswith("1")
        assert "compiled with CUDA graphs" in problem


@pytest.mark.parametrize("make", ALL)
def test_others_are_not(make: Callable[..., nn.Module]) -> None:
    for options in ({}, NO_GRAPHS, {"backend": "eager"}):
        assert cuda_graph_problems(make(**options), CUDA) == []
    assert cuda_graph_problems(make(**WITH_GRAPHS), torch.device("cpu")) == []


def test_what_is_not_compiled_is_left_alone() -> None:
    config = GPTConfig(vocab_size=8, context_length=4, num_layers=1, dim=8, num_heads=2)
    assert cuda_graph_problems(GPT(config), CUDA) == []


def test_a_message_names_a_few() -> None:
    model = nn.Sequential(*[compiled_in_place(**WITH_GRAPHS) for _ in range(9)])
    (problem,) = cuda_graph_problems(model, CUDA)
    assert problem.startswith("0, 1, 2, 3, 4, ...: compiled with CUDA graphs (mode='reduce-overhead'")
    assert "use mode='max-autotune-no-cudagraphs'" in problem
