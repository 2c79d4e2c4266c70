"""Search for the network that a pipeline cuts: an attribute of the user's module, or the module itself."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

_OF_CUTS = ("pipeline_layers", "pipeline_costs")
_TABLES = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")


class OwnForward(nn.Module):
    """Network of a LightningModule whose steps call ``self(...)``.

    It shares the module's submodules, parameters, buffers and training mode.

    Args:
        module: the LightningModule.

    Attributes:
        of: the LightningModule, which is not registered as a submodule.
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
        """Training mode of the module."""
        return self.of.training

    @training.setter
    def training(self, mode: bool) -> None:
        self.of.training = mode

    def __getattr__(self, name: str) -> Any:
        """Read the attributes that describe cuts from the wrapped module."""
        return getattr(vars(self)["of"], name) if name in _OF_CUTS else super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the module's class, even if the object has an attribute ``forward``."""
        return type(self.of).forward(self.of, *args, **kwargs)


def called_by_steps(network: nn.Module) -> nn.Module:
    """Return the module that steps call."""
    return network.of if isinstance(network, OwnForward) else network


def class_name(network: nn.Module) -> str:
    """Return the name of the user's class."""
    return type(called_by_steps(network)).__name__


USUAL = "model"
CUT = "_pipeline_whole"
"""Attribute of a cut model that holds the description of the whole model."""
_KEPT_AS = "_pipeline_network"
_CALLS_ITSELF = r"\b{0}\s*\(|\b{0}\.forward\s*\("


def network_name(module: nn.Module) -> str:
    """Return the name of the network's attribute: ``model``, else the only child that is cut, trains or has parameters.

    Args:
        module: LightningModule, cut or whole.

    Returns:
        Name of the attribute; ``model`` if there is no candidate or several.
    """
    if isinstance(usual := getattr(module, USUAL, None), nn.Module):
        # ``model`` may be a property that returns a child: return the child's name.
        return next((name for name, child in module.named_children() if child is usual), USUAL)
    for holds in (_is_cut, _trains, _has_parameters):
        if names := _children(module, holds):
            is_only = len(names) == 1 and not _own(module)
            is_called = not isinstance(getattr(module, names[0]), (nn.ModuleList, nn.ModuleDict))
            return names[0] if is_only and is_called else USUAL
    return USUAL


def network_in(module: nn.Module | None) -> nn.Module | None:
    """Return the network of a LightningModule; None if it has none."""
    if module is None:
        return None
    own: nn.Module | None = vars(module).get(_KEPT_AS)
    # Once made, an OwnForward stays the network, even if network_name() would choose a child after a cut.
    network = getattr(module, network_name(module) if own is None else USUAL, None)
    if isinstance(network, nn.Module):
        return network
    if own is None and _is_network(module):
        own = vars(module)[_KEPT_AS] = OwnForward(module)
    return own


def name_in_steps(module: nn.Module) -> str:
    """Return the expression by which a LightningModule's steps call its network."""
    return "self" if isinstance(network_in(module), OwnForward) else f"self.{network_name(module)}"


def prefix_of(module: nn.Module) -> str:
    """Return the prefix of the network's parameter names in its LightningModule."""
    return "" if isinstance(network_in(module), OwnForward) else f"{network_name(module)}."


def no_network(module: nn.Module) -> str:
    """Return the message for a module without a network."""
    several = _children(module, _has_parameters)
    if several or _own(module):
        found = ", ".join(f"self.{name}" for name in [*several, *_own(module)][:5])
        return (
            f"{type(module).__name__} has no self.model, and its parameters are in several attributes ({found}): call"
            " these in its forward(), and call self(...) once in every step; or put them into one network, self.model"
        )
    return (
        f"{type(module).__name__} has no self.model: assign the network to it, as an nn.Sequential or a module with"
        " pipeline_layers(), in __init__ or configure_model"
    )


def _is_network(module: nn.Module) -> bool:
    """Return whether a module has parameters, a user's ``forward``, and a method that calls ``self(...)``."""
    return _is_own(type(module).forward) and _has_parameters(module) and _calls_itself(module)


def _is_own(method: Callable[..., Any]) -> bool:
    return method.__module__.partition(".")[0] not in ("torch", "lightning", "pytorch_lightning")


def _calls_itself(module: nn.Module) -> bool:
    """Return whether a method of the user's class calls ``self(...)``; True if no source code can be read."""
    answers = []
    for method in _own_methods(type(module)):
        try:
            itself = next(iter(inspect.signature(method).parameters))
            answers.append(re.search(_CALLS_ITSELF.format(re.escape(itself)), inspect.getsource(method)) is not None)
        except (OSError, TypeError, StopIteration):  # defined at a prompt, or without arguments
            continue
    return any(answers) or not answers


def _own_methods(kind: type) -> Iterator[Callable[..., Any]]:
    """Yield the methods, except ``forward``, that users wrote, including inherited methods."""
    for name in {name for part in kind.__mro__ for name in vars(part)} - {"forward"}:
        method = inspect.getattr_static(kind, name)
        if inspect.isfunction(method) and _is_own(method):
            yield method


def _children(module: nn.Module, holds: Callable[[nn.Module], bool]) -> list[str]:
    return [name for name, child in module.named_children() if holds(child)]


def _own(module: nn.Module) -> list[str]:
    """Return the names of the module's parameters that are not in its children."""
    return [name for name, _ in module.named_parameters(recurse=False)]


def _is_cut(child: nn.Module) -> bool:
    return CUT in vars(called_by_steps(child))


def _trains(child: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in child.parameters())


def _has_parameters(child: nn.Module) -> bool:
    return next(child.parameters(), None) is not None
