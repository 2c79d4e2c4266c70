"""Cutting a model to one stage: its own units stay, under the names that they had; the others go."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import nn

from lightning_asyncpp.core.cut.elsewhere import (
    Home,
    OtherStage,
    homes_of,
    leave_placeholders,
    second_names,
    uses_of,
)
from lightning_asyncpp.core.cut.hidden import release_buffers, release_memory
from lightning_asyncpp.core.cut.materialize import materialize
from lightning_asyncpp.core.cut.stage import Stage
from lightning_asyncpp.core.cut.units import (
    Unit,
    collective_problems,
    meta_problems,
    ownership_problems,
    pipeline_units,
    spread,
)
from lightning_asyncpp.core.cut.whole_model import WholeModel
from lightning_asyncpp.errors import ConfigurationError


def cut(
    model: nn.Module,
    index: int,
    num_stages: int,
    seed: int,
    device: torch.device,
    root: nn.Module | None = None,
    counts: Sequence[int] | None = None,
) -> Stage:
    """Keep the units of stage ``index`` of a model, materialise their meta tensors and drop the other units.

    A model that was cut the same way before, for another Trainer of this process, is taken as it is.

    Args:
        model: an ``nn.Sequential`` or a module with ``pipeline_layers()``; it is changed in place.
        index: the stage, 0 first.
        num_stages: number of stages.
        seed: the run's seed, from which meta tensors are initialised.
        device: where they are allocated.
        root: the module around it, whose other parameters nobody would train.
        counts: units on each stage; None spreads those with parameters evenly.

    Raises:
        ConfigurationError: the model cannot be cut; all reasons are named.
    """
    units = pipeline_units(model)
    before = whole_before(units, index, num_stages)
    if before is not None:
        return _cut_before(model, index, units, before, counts, root)
    counts = spread(units, num_stages) if counts is None else counts
    around = root if root is not None else model
    whole, problems = WholeModel.of(units, counts, around)
    problems = ownership_problems(around, units) + problems
    problems += meta_problems(around, units) + collective_problems(units)
    if problems:
        raise ConfigurationError.from_problems(problems)
    first = sum(counts[:index])
    own = range(first, first + counts[index])
    own_units = [units[position] for position in own]
    stage_of_unit = [stage for stage, count in enumerate(counts) for _ in range(count)]
    # By the meta tensors, which second names outside of the units go on to stand for, and by what takes their places.
    uses, homes = uses_of(own_units), homes_of(units, stage_of_unit, own)
    materialize(units, [*own, *_sharing_with(units, own)], seed, device)
    uses |= uses_of(own_units)
    homes = {t: home for t, home in (homes | homes_of(units, stage_of_unit, own)).items() if t not in uses}
    inside = {module for unit in own_units for module in unit.module.modules()}
    gone: list[nn.Module] = []
    for position, unit in enumerate(units):
        for name, module in unit.submodules.items() if position not in own else ():
            # A member of several layers may be gone already, or be one of this stage's.
            if unit.members is None or (module not in inside and model.get_submodule(name) is module):
                place = OtherStage(name, stage_of_unit[position], num_stages, whole)
                whole.hidden.hide(model, name, place.train(module.training))
                gone.append(module)

    def other(name: str, home: Home) -> OtherStage:
        return OtherStage(name, home.stage, num_stages, whole, home)

    leave_placeholders(around, inside.__contains__, homes, other, whole.hidden)
    for parameter in homes:
        if isinstance(parameter, nn.Parameter):
            release_memory(parameter)
    for module in gone:
        release_buffers(module, uses)
    outside = second_names(around, own_units, uses)
    stage = Stage(model, index, num_stages, own_units, first, whole, around, outside)
    stage.elsewhere = [(weakref.ref(t), home) for t, home in homes.items() if t.requires_grad]
    return stage


def _sharing_with(units: list[Unit], own: range) -> list[int]:
    """Units of other stages that share parameters with this one's: what they hold in common, all must initialise."""
    held = {id(parameter) for position in own for parameter in units[position].module.parameters()}
    others = (position for position in range(len(units)) if position not in own)
    return [p for p in others if any(id(parameter) in held for parameter in units[p].module.parameters())]


def whole_before(units: Sequence[Unit], index: int, num_stages: int) -> WholeModel | None:
    """What is known of a model that was cut before; None if it is whole.

    Args:
        units: of the model.
        index: the stage that is to be cut.
        num_stages: number of stages.

    Raises:
        ConfigurationError: it was cut for another number of stages, or another stage of it is here.
    """
    others = [unit.module for unit in units if isinstance(unit.module, OtherStage)]
    if any(other.num_stages != num_stages or other.stage == index for other in others):
        raise ConfigurationError(
            f"the model was already cut for {others[0].num_stages} stages and cannot be cut for {num_stages}, or not"
            " at the same place: build the module anew; a checkpoint, which holds all stages, brings its weights back"
        )
    return others[0].whole if others else None


def _cut_before(
    model: nn.Module,
    index: int,
    units: list[Unit],
    whole: WholeModel,
    counts: Sequence[int] | None,
    root: nn.Module | None,
) -> Stage:
    if counts is not None and tuple(counts) != whole.counts:
        raise ConfigurationError(
            f"the model was already cut with partition={list(whole.counts)} and cannot be cut with"
            f" partition={list(counts)}: use the same, or build the module anew; a checkpoint, which holds all stages,"
            " brings its weights back"
        )
    around = root if root is not None else model
    if problems := ownership_problems(around, units):
        raise ConfigurationError.from_problems(problems)
    first = sum(whole.counts[:index])
    own_units = units[first : first + whole.counts[index]]
    outside = second_names(around, own_units, uses_of(own_units))
    return Stage(model, index, len(whole.counts), own_units, first, whole, around, outside)
