"""Stages that train nothing, whose optimizer torch would not make: ``AdamW(filter(requires_grad, parameters))``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


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
