"""Gradients of a model for an output of it, and whether two ways to compute it have the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_asyncpp.core.batches.tree import tensors_of

Gradients = dict[str, Tensor]
_ROUNDING = 1e-3  # sums over several uses of a value may come in another order


def gradients_of(model: nn.Module, output: Any) -> Gradients:
    """Name -> gradient of a sum over an output's entries, each with a weight of its own; of parameters that have one.

    Args:
        model: whose parameters they are.
        output: of it, computed with gradients.
    """
    weighed = [
        (tensor * torch.linspace(0.5, 1.5, tensor.numel(), device=tensor.device).view(tensor.shape)).float().sum()
        for tensor in tensors_of(output)
        if tensor.is_floating_point() and tensor.requires_grad
    ]
    names, parameters = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            names.append(name)
            parameters.append(parameter)
    if not weighed or not parameters:
        return {}
    found = torch.autograd.grad(torch.stack(weighed).sum(), parameters, allow_unused=True)
    return {name: gradient for name, gradient in zip(names, found) if gradient is not None}


def other_gradient(expected: Gradients, found: Gradients) -> str:
    """Name of the parameter whose gradients differ most, if any does by more than rounding."""
    scale = max((float(g.abs().max()) for g in expected.values() if g.numel()), default=0.0)
    apart: dict[str, float] = {}
    for name in {**expected, **found}:
        ours, theirs = found.get(name), expected.get(name)
        one = ours if theirs is None else theirs
        if one is None or not one.numel():
            continue
        a, b = (torch.zeros_like(one) if g is None else g for g in (ours, theirs))
        difference = (a.double().nan_to_num() - b.double().nan_to_num()).abs().max()
        apart[name] = float(difference) / max(float(b.abs().max()), 1e-3 * scale, 1e-30)
    worst = max(apart, key=lambda name: apart[name], default="")
    return worst if worst and apart[worst] > _ROUNDING else ""
