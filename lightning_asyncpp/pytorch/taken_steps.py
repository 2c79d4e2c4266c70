"""Whether an optimizer took the step that it was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer


@dataclass
class Steps:
    """What happened to an optimizer.

    Attributes:
        taken: it took a step.
    """

    taken: bool = False


@contextmanager
def watch_steps(optimizer: Optimizer) -> Iterator[Steps]:
    """Tell whether ``optimizer`` takes a step meanwhile: a scaler of fp16 leaves those with infinite gradients out."""
    steps = Steps()

    def note(stepped: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        # A fused optimizer is called all the same, is told by this tensor, and leaves the weights as they are.
        found_inf = getattr(stepped, "found_inf", None)
        steps.taken = found_inf is None or not bool(found_inf)

    handle = optimizer.register_step_post_hook(note)
    try:
        yield steps
    finally:
        handle.remove()
