"""How the outputs of a model's own forward and of its layers differ, by more than rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_asyncpp.core.batches.tree import tensors_of

_ROUNDING = 1e-3


def difference_of(whole: Any, in_order: Any) -> str:
    """In words; an empty string if they do not differ.

    Args:
        whole: what forward returned.
        in_order: what the layers returned, applied one after the other.
    """
    if type(whole) is not type(in_order):
        return f"one returns {kind_of(whole)}, the other {kind_of(in_order)}"
    ours, theirs = list(tensors_of(in_order)), list(tensors_of(whole))
    if len(ours) != len(theirs):
        return f"one returns {len(theirs)} tensors, the other {len(ours)}"
    for a, b in zip(ours, theirs):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"one returns {kind_of(b)}, the other {kind_of(a)}"
        if not torch.equal(a.isnan(), b.isnan()):
            return "one returns NaN where the other does not"
        apart = _apart(a, b)
        if apart > _ROUNDING:
            return f"their outputs differ by {apart:.1e} of the largest entry"
    return ""


def kind_of(value: Any) -> str:
    """Shape and dtype of a tensor, the class of anything else."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    return f"a {type(value).__name__}"


def _apart(a: Tensor, b: Tensor) -> float:
    if torch.equal(a, b):
        return 0.0
    a, b = a.to(torch.float64).nan_to_num(), b.to(torch.float64).nan_to_num()
    return float((a - b).abs().max()) / max(float(b.abs().max()), 1e-30)
