"""Elementwise work on all tensors of a stage at once, in a few kernels where torch has them.

torch documents ``torch.foreach`` from version 2.15 on and keeps the underscored names beside it, which older versions
have alone; they are used here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_asyncpp.private_names import required

_PURPOSE = "work on many tensors at once"
_div_ = required(torch, "_foreach_div_", _PURPOSE)
_copy_ = required(torch, "_foreach_copy_", _PURPOSE)
_norm = required(torch, "_foreach_norm", _PURPOSE)


def divide_(tensors: Sequence[Tensor], divisor: float) -> None:
    """Divide every tensor in place."""
    if tensors:
        _div_(tensors, divisor)


def copy_(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy every source into the destination at its position."""
    if destinations:
        _copy_(destinations, sources)


def norms(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """2-norm of every tensor, (number of tensors,), computed in ``dtype`` where the tensors are."""
    return torch.stack(_norm(tensors, 2, dtype=dtype)) if tensors else torch.zeros(0, dtype=dtype)
