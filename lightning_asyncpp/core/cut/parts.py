"""Several submodules and parameters of a model that make one layer, such as an embedding and a class token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from torch import nn

from lightning_asyncpp.errors import ConfigurationError

KEPT_AS = "_pipeline_parts"  # attribute of a model


class Parts(nn.Module):
    """Holds members of a model, under the names that they have there, and runs what a function makes of them.

    Args:
        members: name in the model -> submodule or parameter; none of them is in another one.
    """

    def __init__(self, members: Mapping[str, nn.Module | nn.Parameter]) -> None:
        super().__init__()
        for name, member in members.items():
            parent, _, key = name.rpartition(".")
            setattr(self._node(parent), key, member)

    def forward(self, function: Callable[..., Any], given: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        """Call the function with the members, and what else it takes.

        Args:
            function: it runs as this module does, with the hooks that somebody has put here.
            given: submodules, and names of parameters, which are other ones for every weight version.
            args: of the function.
            kwargs: of the function.
        """
        # A weight version is no nn.Parameter, as which alone torch would give it.
        members = [attrgetter(member)(self) if isinstance(member, str) else member for member in given]
        return function(members, *args, **kwargs)

    def holds(self, name: str, member: nn.Module | nn.Parameter) -> bool:
        """Whether a member is still the same submodule; a parameter that is not is taken up."""
        parent, _, key = name.rpartition(".")
        node = self.get_submodule(parent)
        if isinstance(member, nn.Parameter) and getattr(node, key) is not member:
            setattr(node, key, member)
        return getattr(node, key) is member

    def _node(self, path: str) -> nn.Module:
        node: nn.Module = self
        for key in path.split(".") if path else ():
            if key not in dict(node.named_children()):
                node.add_module(key, nn.Module())
            node = node.get_submodule(key)
        return node


def parts_of(model: nn.Module, members: Sequence[object]) -> tuple[dict[str, nn.Module], list[Any], Parts]:
    """What one layer consists of.

    Returns:
        Name -> submodule, of those among the members; each member as the submodule or as where it is to be looked up;
        and what holds all of them, the same as long as they are the same.

    Args:
        model: whose members they are.
        members: its submodules and parameters; of a model that was cut, what stands for those of other stages.

    Raises:
        ConfigurationError: something else is among them, or one is inside of another.
    """
    modules = {id(module): name for name, module in model.named_modules()}
    parameters = {id(parameter): name for name, parameter in model.named_parameters()}
    held: dict[str, nn.Module] = {}
    found: dict[str, nn.Module | nn.Parameter] = {}
    given: list[Any] = []
    for member in members:
        if isinstance(member, nn.Module) and modules.get(id(member)):
            held[modules[id(member)]] = found[modules[id(member)]] = member
            given.append(member)
        elif isinstance(member, nn.Parameter) and id(member) in parameters:
            found[parameters[id(member)]] = member
            given.append(parameters[id(member)])
        elif not hasattr(member, "second_name"):  # which tells what stands for a parameter of another stage
            raise ConfigurationError(f"it holds a list with something that is no part of the model: {type(member)}")
    for name in found:
        if outer := next((other for other in held if name.startswith(f"{other}.")), None):
            raise ConfigurationError(f"it holds a list with {name}, which is in {outer} beside it: leave one out")
    return held, given, _kept(model, found)


def _kept(model: nn.Module, members: dict[str, nn.Module | nn.Parameter]) -> Parts:
    known: dict[tuple[str, ...], Parts] = vars(model).setdefault(KEPT_AS, {})
    parts = known.get(tuple(members))
    if parts is None or not all(parts.holds(name, member) for name, member in members.items()):
        parts = known[tuple(members)] = Parts(members)
    return parts
