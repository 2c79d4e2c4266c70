"""Tensors with a shape and a dtype but no memory: the private names of torch that make them, looked for here alone."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lightning_asyncpp.pipeline.wire.boundary import stands_for_tensors
from lightning_asyncpp.private_names import PrivateNameError, required

_PURPOSE = "run a model without memory (asyncpp plan)"


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"torch.{name}")
    except ImportError as error:
        raise PrivateNameError("torch", name, _PURPOSE) from error


_subclasses = _module("_subclasses.fake_tensor")
_dispatch = _module("utils._python_dispatch")

FakeTensorMode: Any = required(_subclasses, "FakeTensorMode", _PURPOSE)
stands_for_tensors(required(_subclasses, "FakeTensor", _PURPOSE))
NeedsValueError: Any = required(_subclasses, "DataDependentOutputException", _PURPOSE)
"""Raised when somebody asks for the value of a tensor that has none."""
NoKernelError: Any = required(_subclasses, "UnsupportedOperatorException", _PURPOSE)
"""Raised by an operator that says nothing about the shape of its result."""
DispatchMode: Any = required(_dispatch, "TorchDispatchMode", _PURPOSE)
"""Base of what sees every operator that runs."""


@cache
def writes(operator: Any) -> bool:
    """Whether an operator writes into its arguments."""
    return bool(required(operator, "_schema", "tell operators that write from those that look").is_mutable)


@contextmanager
def fake_tensors() -> Iterator[None]:
    """New tensors have no memory meanwhile, and what is computed from them has none either."""
    # An operator that does not know the shape of its result must not be run on real zeros to find out.
    with FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False):
        yield


def empty_like(tensor: Tensor) -> Tensor:
    """A new tensor on the CPU of the same shape and dtype, whatever device the other one is on."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


@contextmanager
def without_memory(modules: list[nn.Module]) -> Iterator[None]:
    """Replace all parameters and buffers by new ones on the CPU, those that modules share by shared ones.

    To be entered under :func:`fake_tensors`. At the end the modules hold what they held.
    """
    made: dict[int, Tensor] = {}
    before: list[tuple[nn.Module, str, Tensor]] = []
    seen: set[int] = set()
    for module in (m for top in modules for m in top.modules()):
        if id(module) in seen:
            continue
        seen.add(id(module))
        before += [(module, name, p) for name, p in module.named_parameters(recurse=False, remove_duplicate=False)]
        before += [(module, name, b) for name, b in module.named_buffers(recurse=False, remove_duplicate=False)]
    for module, name, tensor in before:
        if id(tensor) not in made:
            new = empty_like(tensor)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(new, requires_grad=tensor.requires_grad) if is_parameter else new
        setattr(module, name, made[id(tensor)])
    made.clear()
    try:
        yield
    finally:
        for module, name, tensor in before:
            setattr(module, name, tensor)
