"""The arithmetic of Error Feedback on one tensor, in pieces, so that it needs no temporary of the tensor's size."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**20
"""Elements handled at a time. The arithmetic is element by element, so results do not depend on it."""


@torch.no_grad()
def feed_back(weight: Tensor, before: Tensor | None, previous: Tensor, strength: float, ratio: float = 1.0) -> None:
    """Correct ``weight``, which the base optimizer has just stepped, and remember the step.

        u = before - weight;  weight -= strength * (u - ratio * previous);  previous = u

    Args:
        weight: the weights after the base step; changed in place.
        before: the weights before it, of the same shape and dtype; None: the base did not move them, u = 0.
        previous: u of the update before, in the dtype in which u is rounded; changed in place.
        strength: 0 only remembers the step.
        ratio: what the step before would be worth now.
    """
    for start, length in _chunks(weight):
        piece = [t.narrow(0, start, length) for t in map(_at_least_1d, (weight, previous))]
        old = None if before is None else _at_least_1d(before).narrow(0, start, length)
        _feed_back_chunk(piece[0], old, piece[1], strength, ratio)


def _feed_back_chunk(weight: Tensor, before: Tensor | None, previous: Tensor, strength: float, ratio: float) -> None:
    step = torch.zeros_like(previous) if before is None else (before - weight).to(previous.dtype)
    if strength != 0:
        # Rounded once: what is subtracted now is to the bit what will be taken back at the next update. The
        # difference of two rounded steps is taken in the weights' dtype, not in the buffer's.
        weight.sub_(torch.sub(step.to(weight.dtype), previous, alpha=ratio), alpha=strength)
    previous.copy_(step)


def _chunks(t: Tensor) -> Iterator[tuple[int, int]]:
    """Yield (start, length) along the first dimension: works for any strides without a copy."""
    size = t.size(0) if t.ndim else 1
    length = max(1, CHUNK_ELEMENTS * size // max(1, t.numel()))
    for start in range(0, size, length):
        yield start, min(length, size - start)


def _at_least_1d(t: Tensor) -> Tensor:
    return t.unsqueeze(0) if t.ndim == 0 else t
