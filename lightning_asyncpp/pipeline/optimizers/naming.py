"""What messages call an optimizer."""

from __future__ import annotations

from torch.optim import Optimizer


def name_of(optimizer: Optimizer) -> str:
    """Its class, with that of what it wraps in brackets, if anything."""
    inner, name = getattr(optimizer, "base", None), type(optimizer).__name__  # that of a correction
    return f"{name}({name_of(inner)})" if isinstance(inner, Optimizer) else name
