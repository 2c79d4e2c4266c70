"""A LightningModule that is the network itself: its layers are its own attributes, and its steps call ``self(...)``."""

from __future__ import annotations

from typing import Any

from torch import nn

_OF_CUTS = ("pipeline_layers", "pipeline_costs")
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

    def __getattr__(self, name: str) -> Any:
        """Where to cut it, the module may say."""
        return getattr(vars(self)["of"], name) if name in _OF_CUTS else super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's class computes, whatever stands as ``forward`` in the object."""
        return type(self.of).forward(self.of, *args, **kwargs)


def called_by_steps(network: nn.Module) -> nn.Module:
    """What a step calls when it calls a network; its attributes are those that ``forward`` reads and sets."""
    return network.of if isinstance(network, OwnForward) else network


def class_name(network: nn.Module) -> str:
    """The name of the class that the user wrote."""
    return type(called_by_steps(network)).__name__
