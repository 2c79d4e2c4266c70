"""Hooks that prepare a batch, on stages that have none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from lightning.pytorch.core.hooks import DataHooks

from lightning_asyncpp.strategy_parts.stage_loader import has_placeholder

_HOOK = "on_before_batch_transfer"


class PlaceholderHooks:
    """Lets placeholders pass ``on_before_batch_transfer`` by, until :meth:`release`.

    Args:
        targets: the module and the data module, as far as there are any.
    """

    def __init__(self, targets: Iterable[Any]) -> None:
        self._targets = [
            target
            for target in targets
            if target is not None and getattr(type(target), _HOOK, None) is not DataHooks.on_before_batch_transfer
        ]
        for target in self._targets:
            target.__dict__[_HOOK] = functools.partial(_unless_placeholder, getattr(target, _HOOK))

    def release(self) -> None:
        """Give the hooks back."""
        for target in self._targets:
            target.__dict__.pop(_HOOK, None)
        self._targets = []


def _unless_placeholder(hook: Callable[[Any, int], Any], batch: Any, dataloader_idx: int) -> Any:
    return batch if has_placeholder(batch) else hook(batch, dataloader_idx)
