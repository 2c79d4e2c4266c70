"""Options that go by the order or the number of parameters, as a learning rate that decays with their position does.

A stage has its own parameters alone, and would count from its own first one. So where there are several groups, the
user's function is asked once more, with the layers of the other stages in their places: what it gives this stage's
parameters must be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_asyncpp.core.optimizers.configured import is_placeholder, optimizers_in
from lightning_asyncpp.core.optimizers.probe import aside

_NAMES_ALONE = ("params", "param_names", "name")
_MOST_NAMED = 3
Options = dict[str, Any]
Layers = Mapping[str, nn.Module]
"""Name in the model -> a layer of another stage, without memory."""


def options_of(optimizers: Sequence[Optimizer], names: Mapping[Tensor, str]) -> dict[str, Options]:
    """Name -> the options of its group, for the parameters that have one.

    Args:
        optimizers: with their groups.
        names: parameter -> name.
    """
    return {
        names[parameter]: {key: value for key, value in group.items() if key not in _NAMES_ALONE}
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter in names
    }


def may_go_by_position(optimizers: Sequence[Optimizer], trained: Sequence[Tensor]) -> bool:
    """Whether there are several groups, or trainable parameters that none has."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    held = {id(parameter) for group in groups for parameter in group["params"] if not is_placeholder(parameter)}
    return len(groups) > 1 or any(id(parameter) not in held for parameter in trained)


def position_problems(on_stage: Mapping[str, Options], in_whole: Mapping[str, Options]) -> list[str]:
    """What a stage's parameters get there and would not in the whole model, with the mend.

    Args:
        on_stage: name -> options, of the stage's parameters.
        in_whole: the same, made from the whole model; others may be among them.
    """
    other = [name for name in {**on_stage, **in_whole} if not _same(on_stage.get(name), in_whole.get(name))]
    if not other:
        return []
    differences = [_difference(name, on_stage.get(name), in_whole.get(name)) for name in other[:_MOST_NAMED]]
    return [
        "configure_optimizers goes by the position or the number of parameters, of which a stage has its own alone:"
        f" {'; '.join(differences)}{' and more' if len(other) > _MOST_NAMED else ''}. Go by their names"
        " (self.named_parameters()), or by the position of a layer in self.model, which is the same on every stage"
    ]


def without_memory(layer: nn.Module, stand_ins: dict[Tensor, Tensor]) -> nn.Module:
    """The layer, whose parameters and buffers now have one element each that stands for all of them.

    Args:
        layer: it is changed.
        stand_ins: tensor -> what takes its place; others are added.
    """
    for module in layer.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in stand_ins:
                stand_ins[parameter] = nn.Parameter(_empty(parameter), parameter.requires_grad)
            module.register_parameter(name, stand_ins[parameter])  # type: ignore[arg-type]
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            module.register_buffer(name, stand_ins.setdefault(buffer, _empty(buffer)))
    return layer


@contextmanager
def whole_again(model: nn.Module, layers: Layers) -> Iterator[None]:
    """Have layers of other stages in their places."""
    places = []
    for name, layer in layers.items():
        parent, _, key = name.rpartition(".")
        places.append((model.get_submodule(parent), key, model.get_submodule(name)))
        setattr(model.get_submodule(parent), key, layer)
    try:
        yield
    finally:
        for module, key, placeholder in places:
            setattr(module, key, placeholder)


def asked_again(module: nn.Module, model: nn.Module, layers: Layers, configure: Callable[[], Any]) -> list[Optimizer]:
    """What a user's function gives with the whole model; what it keeps in the module is what it kept before.

    Args:
        module: the user's, whose attributes are restored.
        model: its part that was cut.
        layers: of the other stages.
        configure: the function.
    """
    attributes = dict(vars(module))
    try:
        with aside(), whole_again(model, layers):
            return optimizers_in(configure())
    finally:
        vars(module).clear()
        vars(module).update(attributes)


def _empty(tensor: Tensor) -> Tensor:
    device = "cpu" if tensor.is_meta else tensor.device
    return torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)


def _difference(name: str, here: Options | None, whole: Options | None) -> str:
    if here is None or whole is None:
        has, has_not = (
            ("on its stage", "in the whole model") if whole is None else ("in the whole model", "on its stage")
        )
        return f"{name} is in a group {has} and in none {has_not}"
    key = next(key for key in {**here, **whole} if not _equal(here.get(key), whole.get(key)))
    return f"{name} has {key}={here.get(key)} on its stage and {key}={whole.get(key)} in the whole model"


def _same(here: Options | None, whole: Options | None) -> bool:
    if here is None or whole is None:
        return here is whole
    return here.keys() == whole.keys() and all(_equal(here[key], whole[key]) for key in here)


def _equal(here: Any, whole: Any) -> bool:
    if isinstance(here, Tensor) and isinstance(whole, Tensor):
        return torch.equal(here, whole)
    return here is whole or bool(here == whole)
