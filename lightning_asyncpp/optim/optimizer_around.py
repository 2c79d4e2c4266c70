"""An optimizer around another one, which does what it does and something more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer


class OptimizerAround(Optimizer):
    """Wraps an optimizer, and looks like it.

    ``param_groups``, ``state`` and ``defaults`` are the base optimizer's own, so schedulers, monitors and whoever sets
    ``group["lr"]`` act on it.

    Attributes:
        base: the wrapped optimizer.
    """

    base: Optimizer

    def __init__(self, base: Optimizer) -> None:
        super().__init__([torch.zeros(())], {})  # a stand-in: groups, state and defaults are the base's
        self._adopt(base)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The base optimizer's."""
        groups: list[dict[str, Any]] = self._owner().param_groups
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._owner().param_groups = groups

    @property
    def state(self) -> Any:
        """The base optimizer's."""
        return self._owner().state

    @state.setter
    def state(self, state: Any) -> None:
        self._owner().state = state

    def __getattr__(self, name: str) -> Any:
        """The modes of schedule-free optimizers, ``train()`` and ``eval()``, where the base has them."""
        if name in ("train", "eval") and "base" in self.__dict__:
            return getattr(self.base, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _owner(self) -> Any:
        # torch sets and reads both while this object is being made, before there is a base.
        found = self.__dict__.get("base")
        return self.__dict__.setdefault("_unused", SimpleNamespace()) if found is None else found

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, in the base optimizer's way."""
        self.base.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base optimizer."""
        if hasattr(self, "base"):
            self.base.add_param_group(param_group)
        else:  # called by torch while this object is being made
            super().add_param_group(param_group)

    def _adopt(self, optimizer: Optimizer) -> None:
        self.__dict__.pop("_unused", None)
        self.base = optimizer
        self.defaults = optimizer.defaults

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]
