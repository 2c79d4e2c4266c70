"""Cutting a model to one stage: its modules stay where they are, and hold nothing of what lives on other stages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_asyncpp.core.cut.materialize import materialize
from lightning_asyncpp.core.cut.own_forward import buffers_everywhere, cut_of
from lightning_asyncpp.core.cut.stage import Stage
from lightning_asyncpp.core.cut.units import (
    Unit,
    collective_problems,
    meta_problems,
    ownership_problems,
    pipeline_units,
    spread,
)
from lightning_asyncpp.core.cut.whole_model import WholeModel, whole_of
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
    """Keep the units of stage ``index`` of a model, materialise their meta tensors, and prune the other units.

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
    units, around = pipeline_units(model), model if root is None else root
    whole = whole_before(model, index, num_stages)
    if whole is None:
        whole = _prune(model, index, seed, device, around, spread(units, num_stages) if counts is None else counts)
        units = pipeline_units(model)
    elif counts is not None and tuple(counts) != whole.counts:
        raise ConfigurationError(
            f"the model was already cut with partition={list(whole.counts)} and cannot be cut with"
            f" partition={list(counts)}: use the same, or build the module anew; a checkpoint, which holds all stages,"
            " brings its weights back"
        )
    elif problems := ownership_problems(around, units):
        raise ConfigurationError.from_problems(problems)
    first = sum(whole.counts[:index])
    return Stage(model, index, num_stages, units[first : first + whole.counts[index]], first, whole, around)


def whole_before(model: nn.Module, index: int, num_stages: int) -> WholeModel | None:
    """What is known of a model that was cut before; None if it is whole.

    Args:
        model: it.
        index: the stage that is to be cut.
        num_stages: number of stages.

    Raises:
        ConfigurationError: it was cut for another number of stages, or another stage of it is here.
    """
    whole = whole_of(model)
    if whole is not None and (len(whole.counts), whole.pruned.stage) != (num_stages, index):
        raise ConfigurationError(
            f"the model was already cut for {len(whole.counts)} stages and cannot be cut for {num_stages}, or not"
            " at the same place: build the module anew; a checkpoint, which holds all stages, brings its weights back"
        )
    return whole


def _prune(
    model: nn.Module, index: int, seed: int, device: torch.device, root: nn.Module, counts: Sequence[int]
) -> WholeModel:
    """Give what this stage holds its values, and take out of the module what it does not hold."""
    units = pipeline_units(model)
    whole, problems = WholeModel.of(units, counts, root)
    problems = ownership_problems(root, units) + problems
    problems += meta_problems(root, units) + collective_problems(units)
    if problems:
        raise ConfigurationError.from_problems(problems)
    first = sum(counts[:index])
    own = range(first, first + counts[index])
    materialize(units, [*own, *_sharing_with(units, own)], seed, device, root)
    units = pipeline_units(model)
    kept = {tensor for position in own for tensor in _tensors_of(units[position])}
    if (as_it_is := cut_of(model)) is not None:
        kept |= set(buffers_everywhere(model, as_it_is))
    others = [units[position] for position in range(len(units)) if position not in own]
    # Layers of other stages that share weights with this one's hold nothing either; but the code of a model that is cut
    # as it is may use any module on any stage.
    own_modules = {module for position in own for module in units[position].module.modules()}
    modules = {module for unit in others for module in unit.module.modules()} if as_it_is is None else set()
    gone = [t for unit in others for t in _tensors_of(unit) if t not in kept]
    whole.pruned.prune(root, index, gone, modules - own_modules)
    if len(counts) > 1:
        whole.keep(model)
    return whole


def _tensors_of(unit: Unit) -> list[Tensor]:
    return [*unit.module.parameters(), *unit.module.buffers()]


def _sharing_with(units: list[Unit], own: range) -> list[int]:
    """Units of other stages that share parameters with this one's: what they hold in common, all must initialise."""
    held = {id(parameter) for position in own for parameter in units[position].module.parameters()}
    others = (position for position in range(len(units)) if position not in own)
    return [p for p in others if any(id(parameter) in held for parameter in units[p].module.parameters())]
