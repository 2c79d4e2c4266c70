"""Comparing a model's own forward with its layers applied one after the other, which is all that a pipeline runs."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from lightning_asyncpp.pipeline.batches.tree import tensors_of
from lightning_asyncpp.pipeline.cut.units import pipeline_units
from lightning_asyncpp.pipeline.errors import ConfigurationError

_ROUNDING = 1e-3


def compare_calls(network: nn.Module, args: tuple, kwargs: dict[str, Any], seed: int, name: str) -> None:
    """Call a model, and apply its layers in order, on copies.

    Args:
        network: the model.
        args: of the call.
        kwargs: of the call.
        seed: both run under generators seeded with it.
        name: how the user calls the model.

    Raises:
        ConfigurationError: a layer cannot take what the one before returned, or the outputs differ.
    """
    with torch.random.fork_rng(), torch.no_grad():
        whole = _called(copy.deepcopy((network, args, kwargs)), seed)
        in_order = _applied(copy.deepcopy((network, args, kwargs)), seed)
    if difference := _difference(whole, in_order):
        raise ConfigurationError(
            f"{name}(...) and its layers, applied one after the other, are not the same: {difference}. A pipeline runs"
            f" the layers alone, so forward() of {type(network).__name__} must do nothing before, between and after"
            " them: move what it does into a layer, or into the function that pipeline_layers() pairs with one;"
            " `return lightning_asyncpp.apply_layers(self, ...)` is a forward() that fits. Random numbers must be"
            " torch's, and be drawn in layers"
        )


def _called(call: tuple[nn.Module, tuple, dict[str, Any]], seed: int) -> Any:
    network, args, kwargs = call
    torch.manual_seed(seed)
    return network(*args, **kwargs)


def _applied(call: tuple[nn.Module, tuple, dict[str, Any]], seed: int) -> Any:
    network, args, kwargs = call
    torch.manual_seed(seed)
    before = "the arguments of the model"
    for unit in pipeline_units(network):
        try:
            output = unit.apply(args, kwargs)
        except Exception as error:
            raise ConfigurationError(
                f"layer {unit.name!r} ({type(unit.module).__name__}) cannot take {before}, {_kinds(args, kwargs)}:"
                f" {type(error).__name__}: {error}. Each layer takes what the one before it returned, the first one the"
                f" arguments of the model: pair it with a function in pipeline_layers() that hands over what it needs"
            ) from error
        args, kwargs, before = (output,), {}, f"what layer {unit.name!r} returned"
    return args[0]


def _difference(whole: Any, in_order: Any) -> str:
    """How two outputs differ by more than rounding; an empty string if they do not."""
    if type(whole) is not type(in_order):
        return f"one returns {_kind(whole)}, the other {_kind(in_order)}"
    ours, theirs = list(tensors_of(in_order)), list(tensors_of(whole))
    if len(ours) != len(theirs):
        return f"one returns {len(theirs)} tensors, the other {len(ours)}"
    for a, b in zip(ours, theirs):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"one returns {_kind(b)}, the other {_kind(a)}"
        apart = _apart(a, b)
        if apart > _ROUNDING:
            return f"their outputs differ by {apart:.1e} of the largest entry"
    return ""


def _apart(a: Tensor, b: Tensor) -> float:
    if torch.equal(a, b):
        return 0.0
    a, b = a.to(torch.float64).nan_to_num(), b.to(torch.float64).nan_to_num()
    return float((a - b).abs().max()) / max(float(b.abs().max()), 1e-30)


def _kinds(args: tuple, kwargs: dict[str, Any]) -> str:
    return "(" + ", ".join([*map(_kind, args), *(f"{name}={_kind(value)}" for name, value in kwargs.items())]) + ")"


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    return f"a {type(value).__name__}"
