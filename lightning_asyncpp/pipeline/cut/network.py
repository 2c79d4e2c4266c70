"""Which attribute of a user's module is the network that a pipeline cuts."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from lightning_asyncpp.pipeline.cut.elsewhere import OtherStage

USUAL = "model"


def network_name(module: nn.Module) -> str:
    """The attribute that holds it: ``model``, or the only one with parameters, those that are trained before others.

    Args:
        module: a LightningModule; cut or whole.

    Returns:
        The name; ``model`` where none is there yet, or several could be.
    """
    if isinstance(usual := getattr(module, USUAL, None), nn.Module):
        return next((name for name, child in module.named_children() if child is usual), USUAL)  # of a property's
    for holds in (_is_cut, _trains, _has_parameters):
        if names := _children(module, holds):
            return names[0] if len(names) == 1 and not _own(module) else USUAL
    return USUAL


def network_in(module: nn.Module | None) -> nn.Module | None:
    """The network itself; None where there is none."""
    network = None if module is None else getattr(module, network_name(module), None)
    return network if isinstance(network, nn.Module) else None


def no_network(module: nn.Module) -> str:
    """What to say to the user where there is none."""
    several = _children(module, _has_parameters)
    if several or _own(module):
        found = ", ".join(f"self.{name}" for name in [*several, *_own(module)][:5])
        return (
            f"{type(module).__name__} has no self.model, and its parameters are in several attributes ({found}): put"
            " the layers into one network, an nn.Sequential or a module with pipeline_layers(), and call that"
        )
    return (
        f"{type(module).__name__} has no self.model: assign the network to it, as an nn.Sequential or a module with"
        " pipeline_layers(), in __init__ or configure_model"
    )


def _children(module: nn.Module, holds: Callable[[nn.Module], bool]) -> list[str]:
    return [name for name, child in module.named_children() if holds(child)]


def _own(module: nn.Module) -> list[str]:
    """Parameters that are held by the module itself."""
    return [name for name, _ in module.named_parameters(recurse=False)]


def _is_cut(child: nn.Module) -> bool:
    return any(isinstance(part, OtherStage) for part in child.modules())


def _trains(child: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in child.parameters())


def _has_parameters(child: nn.Module) -> bool:
    return next(child.parameters(), None) is not None
