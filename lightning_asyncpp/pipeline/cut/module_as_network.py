"""A LightningModule that is the network itself: its layers are its own attributes, and its steps call ``self(...)``."""

from __future__ import annotations

from typing import Any

from torch import nn

_CLASSES: dict[Any, type[OwnForward]] = {}
_TABLES = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")


class OwnForward(nn.Module):
    """The network of a module that is one itself, and whose steps call ``self(...)``.

    It has the same submodules, parameters, buffers and mode, under the same names.

    Args:
        module: a LightningModule.

    Attributes:
        of: the module, no submodule of this one.
    """

    of: nn.Module

    def __init__(self, module: nn.Module) -> None:
        vars(self)["of"] = module
        mode = module.training
        super().__init__()
        vars(self).update({table: vars(module)[table] for table in _TABLES})
        module.training = mode

    @property
    def training(self) -> bool:
        """The mode of the module."""
        return self.of.training

    @training.setter
    def training(self, mode: bool) -> None:
        self.of.training = mode

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's class computes, whatever stands as ``forward`` in the object."""
        return type(self.of).forward(self.of, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unfilled, (type(self.of),), self.__dict__


def _class_of(module: type[nn.Module]) -> type[OwnForward]:
    """With the name of the module's class, for messages."""
    return _CLASSES.setdefault(module, type(module.__name__, (OwnForward,), {}))


def _unfilled(module: type[nn.Module]) -> OwnForward:
    kind = _class_of(module)
    return kind.__new__(kind)


def network_of_itself(module: nn.Module) -> OwnForward:
    """A network that is the module."""
    return _class_of(type(module))(module)


def called_by_steps(network: nn.Module) -> nn.Module:
    """What a step calls when it calls a network."""
    return network.of if isinstance(network, OwnForward) else network
