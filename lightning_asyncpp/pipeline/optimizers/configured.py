"""What ``configure_optimizers`` of a LightningModule returned, in any of Lightning's forms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer


def optimizers_in(configured: Any) -> list[Optimizer]:
    """The optimizers among it."""
    if isinstance(configured, Optimizer):
        return [configured]
    if isinstance(configured, Mapping):
        return optimizers_in(configured.get("optimizer"))
    if isinstance(configured, (list, tuple)):
        if configured and isinstance(configured[0], (list, tuple)):
            configured = configured[0]  # optimizers and schedulers
        return [optimizer for entry in configured for optimizer in optimizers_in(entry)]
    return []
