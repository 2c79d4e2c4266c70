"""Optimizers as ``configure_optimizers`` gave them: in any of Lightning's forms, and how messages call them.

A stage may train nothing, and torch would not make ``AdamW(filter(requires_grad, parameters))`` of it: it gets a
placeholder.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def name_of(optimizer: Optimizer) -> str:
    """Its class, with that of what it wraps in brackets, if anything."""
    inner, name = getattr(optimizer, "base", None), type(optimizer).__name__  # that of a correction
    return f"{name}({name_of(inner)})" if isinstance(inner, Optimizer) else name


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


class Placeholder(nn.Parameter):
    """Stands in an optimizer that would have no parameter; it never has a gradient, and is saved nowhere."""


def is_placeholder(parameter: Tensor) -> bool:
    """Whether it stands for nothing."""
    return isinstance(parameter, Placeholder)


class EmptyOptimizers:
    """Lets optimizers be made from an empty list of parameters, from :meth:`begin` to :meth:`end`.

    So what configures optimizers need not know that this rank's stage trains nothing: groups, options and schedulers
    are made as on all other ranks. Also a context manager.
    """

    def __init__(self) -> None:
        self._init: Callable[..., None] | None = None

    def begin(self) -> None:
        """Put a placeholder into optimizers that are made without a parameter."""
        if self._init is not None:
            return
        self._init = init = Optimizer.__init__

        @functools.wraps(init)
        def with_placeholder(optimizer: Optimizer, params: Any, *args: Any, **kwargs: Any) -> None:
            entries = params if isinstance(params, Tensor) else list(params)
            empty = not isinstance(entries, Tensor) and not entries
            init(optimizer, [Placeholder(torch.zeros(1))] if empty else entries, *args, **kwargs)

        Optimizer.__init__ = self._replacement = with_placeholder  # type: ignore[method-assign, assignment]

    def end(self) -> None:
        """Let torch refuse empty lists again."""
        if self._init is not None and Optimizer.__init__ is self._replacement:
            Optimizer.__init__ = self._init  # type: ignore[method-assign]
        self._init = None

    def __enter__(self) -> EmptyOptimizers:
        self.begin()
        return self

    def __exit__(self, *_: Any) -> None:
        self.end()


def trains_nothing(module: nn.Module) -> bool:
    """Whether no parameter of what is here of a module requires a gradient."""
    return not any(parameter.requires_grad for parameter in module.parameters())
