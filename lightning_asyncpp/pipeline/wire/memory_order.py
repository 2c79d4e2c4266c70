"""In which order the dimensions of a tensor lie in memory, which has to survive a cut.

A product of matrices is rounded otherwise, and a convolution is slower, where its input lies otherwise in memory than
it would in a single process: transposed, or with the channels last.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Order = tuple[int, ...]
"""Dimensions, the one with the largest stride first; empty: as they are numbered, which nearly all tensors are."""


def order_of(tensor: Tensor) -> Order:
    """The order of a tensor, which may have gaps; a copy without any is what travels."""
    if tensor.is_contiguous():
        return ()
    order = tuple(tensor.dim_order())
    return () if order == tuple(range(tensor.ndim)) else order


def as_stored(tensor: Tensor, order: Order) -> Tensor:
    """A view with the dimensions as they lie in memory: contiguous if ``order`` is the tensor's and it has no gaps."""
    return tensor.permute(order) if order else tensor


def empty(shape: Sequence[int], order: Order, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor whose dimensions lie so in memory."""
    if not order:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty_permuted(shape, order, dtype=dtype, device=device)
