"""The arithmetic of Error Feedback on one tensor, in pieces, so that it needs no temporary of the tensor's size."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

CPU_CHUNK_ELEMENTS = 2**17
"""Elements handled at a time on a CPU: what the operations share stays in its cache, and memory is read once. The
arithmetic is element by element, so results do not depend on it."""

CHUNK_ELEMENTS = 2**23
"""The same elsewhere, where every piece costs a few kernel launches."""


@torch.no_grad()
def feed_back(weight: Tensor, before: Tensor | None, previous: Tensor, strength: float) -> None:
    """Correct ``weight``, which the base optimizer has just stepped, and remember the step.

        u = before - weight;  weight -= strength * (u - previous);  previous = u

    Args:
        weight: the weights after the base step; changed in place.
        before: the weights before it, of the same shape and dtype; None: the base did not move them, u = 0.
        previous: u of the update before, in the dtype in which u is rounded; changed in place.
        strength: 0 only remembers the step.
    """
    tensors = [weight, previous] if before is None else [weight, previous, before]
    if all(t.is_contiguous() for t in tensors):  # rows may be long: pieces of one dimension are never too large
        tensors = [t.view(-1) for t in tensors]
    scratch: Tensor | None = None
    for start, length in _chunks(tensors[0]):
        pieces = [t.narrow(0, start, length) for t in tensors]
        scratch = torch.empty_like(pieces[0]) if scratch is None else scratch  # the first piece is the largest
        step = scratch.narrow(0, 0, length)
        _set_step(step, pieces[0], pieces[2] if len(pieces) == 3 else None)
        _feed_back_chunk(pieces[0], step, pieces[1], strength)


@torch.no_grad()
def extrapolate(weight: Tensor, step: Tensor, strength: float, out: Tensor) -> None:
    """Write ``weight - strength * step`` into ``out``, which may have another dtype; rounded once.

    Args:
        weight: of any shape.
        step: the same shape and dtype.
        strength: how far.
        out: the same shape; its memory is no other's.
    """
    tensors = [weight, step, out]
    if all(t.is_contiguous() for t in tensors):
        tensors = [t.view(-1) for t in tensors]
    for start, length in _chunks(tensors[0]):
        of_weight, of_step, of_out = (t.narrow(0, start, length) for t in tensors)
        of_out.copy_(torch.sub(of_weight, of_step, alpha=strength))


def _set_step(step: Tensor, weight: Tensor, before: Tensor | None) -> None:
    if before is None:
        step.zero_()
    else:
        torch.sub(before, weight, out=step)


def _feed_back_chunk(weight: Tensor, step: Tensor, previous: Tensor, strength: float) -> None:
    if step.dtype != previous.dtype:
        # Rounded once: what is subtracted now is to the bit what will be taken back at the next update. The
        # difference of two rounded steps is taken in the weights' dtype, not in the buffer's.
        rounded = step.to(previous.dtype)
        if strength != 0:
            weight.sub_(torch.sub(rounded.to(weight.dtype), previous), alpha=strength)
        previous.copy_(rounded)
        return
    if strength != 0:
        torch.sub(step, previous, out=previous)  # the buffer holds the difference in between
        weight.sub_(previous, alpha=strength)
    previous.copy_(step)


def _chunks(t: Tensor) -> Iterator[tuple[int, int]]:
    """Yield (start, length) along the first dimension: works for any strides without a copy."""
    size = t.size(0)
    elements = CPU_CHUNK_ELEMENTS if t.device.type == "cpu" else CHUNK_ELEMENTS
    length = max(1, elements * size // max(1, t.numel()))
    for start in range(0, size, length):
        yield start, min(length, size - start)
