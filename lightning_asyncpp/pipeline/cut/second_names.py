"""Second names, outside of a stage's layers, of parameters that these hold, as ``model.shared`` of a T5 is.

While a layer runs such a name stands for the parameter as that layer uses it, or the last one before it that holds it,
or the first one that does: so gradients are summed in the same order on any number of stages. Where the last one before
it is on another stage, its use is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from lightning_asyncpp.pipeline.cut.elsewhere import Home
from lightning_asyncpp.pipeline.cut.ties import Tie
from lightning_asyncpp.pipeline.cut.units import Unit

Uses = dict[int, str]
"""Position of a unit on its stage -> what it calls the parameter, in the model."""


class SecondName(NamedTuple):
    """Where a module outside the units keeps what some of them hold.

    Attributes:
        module: it.
        key: the name there.
        uses: of the tensor.
    """

    module: nn.Module
    key: str
    uses: Uses


def use_in(uses: Uses, position: int) -> str:
    """The use that a second name means while the unit at a position runs."""
    before = [use for at, use in uses.items() if at <= position]
    return before[-1] if before else next(iter(uses.values()))


def home_before(ties: Sequence[Tie], stage: int, name: str) -> Home | None:
    """Where a parameter lives for the layers of a stage that run before the first one there that holds it.

    Args:
        ties: of the whole model.
        stage: this one.
        name: of the parameter on it.

    Returns:
        The last stage before it that holds the parameter, and its name there; None if there is none.
    """
    tie = next((tie for tie in ties if stage in tie.stages and tie.name_on(stage) == name), None)
    before = tie.before(stage) if tie is not None else None
    return None if tie is None or before is None else Home(tie.name_on(before), before, also_later=True)


def uses_of(units: Sequence[Unit]) -> dict[Tensor, Uses]:
    """Parameters and buffers of a stage's units -> where they are used."""
    uses: dict[Tensor, Uses] = {}
    for position, unit in enumerate(units):
        for name, tensor in (*unit.module.named_parameters(), *unit.module.named_buffers()):
            uses.setdefault(tensor, {})[position] = f"{unit.name}.{name}"
    return uses


def homes_of(units: Sequence[Unit], stage_of_unit: Sequence[int], own: range) -> dict[Tensor, Home]:
    """Where the parameters and buffers of other stages' units live, the first one that holds them."""
    homes: dict[Tensor, Home] = {}
    for position, (unit, stage) in enumerate(zip(units, stage_of_unit)):
        if position not in own:
            for name, tensor in (*unit.module.named_parameters(), *unit.module.named_buffers()):
                homes.setdefault(tensor, Home(f"{unit.name}.{name}", stage))
    return homes


def second_names(root: nn.Module, units: Sequence[Unit], uses: Mapping[Tensor, Uses]) -> list[SecondName]:
    """Second names outside of the units of a stage.

    Args:
        root: what is looked through.
        units: of the stage.
        uses: of what they hold.
    """
    inside = {module for unit in units for module in unit.module.modules()}
    return [
        SecondName(module, key, uses[tensor])
        for module in root.modules()
        if module not in inside
        for named in (module.named_parameters, module.named_buffers)
        for key, tensor in named(recurse=False, remove_duplicate=False)
        if tensor in uses
    ]
