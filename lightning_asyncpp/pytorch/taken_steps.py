"""Whether an optimizer took the step that it was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


@dataclass
class Steps:
    """What happened to an optimizer.

    Attributes:
        called: its step was called.
        found_inf: what it was told of the gradients: above 0 if some are infinite, on their device.
    """

    called: bool = False
    found_inf: Tensor | None = None

    @property
    def taken(self) -> bool:
        """Whether it took a step; waits for the device if a scaler is at work."""
        return self.called and (self.found_inf is None or not bool(self.found_inf))


@contextmanager
def watch_steps(optimizer: Optimizer) -> Iterator[Steps]:
    """Tell whether ``optimizer`` takes a step meanwhile: a scaler of fp16 leaves those with infinite gradients out."""
    steps = Steps()

    def note(stepped: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        # A fused optimizer is called all the same, is told by this tensor, and leaves the weights as they are.
        steps.called, steps.found_inf = True, getattr(stepped, "found_inf", None)

    handle = optimizer.register_step_post_hook(note)
    try:
        yield steps
    finally:
        handle.remove()
