"""Reduction of a model to one stage: all modules stay, but tensors of other stages are removed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from lightning_asyncpp.core.cut.own_forward import buffers_everywhere, cut_of
from lightning_asyncpp.core.cut.partition import uniform
from lightning_asyncpp.core.cut.pruned import fill, places_of
from lightning_asyncpp.core.cut.stage import Stage
from lightning_asyncpp.core.cut.units import (
    Unit,
    collective_problems,
    has_parameters,
    meta_problems,
    ownership_problems,
    pipeline_units,
)
from lightning_asyncpp.core.cut.whole_model import WholeModel, whole_of
from lightning_asyncpp.core.randomness import seeded
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
    """Keep the units of stage ``index``, materialise their meta tensors, and prune the other units.

    A unit is a part of the model between two possible cuts. A model that was already cut in the same way, for another
    Trainer of this process, is used as it is.

    Args:
        model: ``nn.Sequential`` or module with ``pipeline_layers()``, changed in place.
        index: index of the stage.
        num_stages: number of stages.
        seed: seed of the run, for the initialisation of meta tensors.
        device: device of materialised tensors.
        root: module that contains the model and has no other trainable parameters.
        counts: number of units on each stage; default: units with parameters are spread evenly.

    Raises:
        ConfigurationError: the model cannot be cut; the message has all reasons.
    """
    units, around = pipeline_units(model), model if root is None else root
    whole = whole_before(model, index, num_stages)
    if whole is None:
        counts = uniform(list(map(has_parameters, units)), num_stages) if counts is None else counts
        whole = _prune(model, index, seed, device, around, counts)
        units = pipeline_units(model)
    elif counts is not None and tuple(counts) != whole.counts:
        raise ConfigurationError(
            f"the model was already cut with partition={list(whole.counts)} and cannot be cut with"
            f" partition={list(counts)}: use the same partition, or build a new module and load its weights from a"
            " checkpoint"
        )
    elif problems := ownership_problems(around, units):
        raise ConfigurationError.from_problems(problems)
    first = sum(whole.counts[:index])
    return Stage(model, index, num_stages, units[first : first + whole.counts[index]], first, whole, around)


def whole_before(model: nn.Module, index: int, num_stages: int) -> WholeModel | None:
    """Return the description of a model that was cut before; None if the model is whole.

    Args:
        model: the model.
        index: index of the stage to be cut.
        num_stages: number of stages.

    Raises:
        ConfigurationError: the model was cut for another number of stages or to another stage.
    """
    whole = whole_of(model)
    if whole is not None and (len(whole.counts), whole.pruned.stage) != (num_stages, index):
        raise ConfigurationError(
            f"the model was already cut to stage {whole.pruned.stage} of {len(whole.counts)} and cannot be cut to stage"
            f" {index} of {num_stages}: build a new module and load its weights from a checkpoint"
        )
    return whole


def _prune(
    model: nn.Module, index: int, seed: int, device: torch.device, root: nn.Module, counts: Sequence[int]
) -> WholeModel:
    """Materialise the tensors of this stage, and remove other stages' tensors from the module."""
    units = pipeline_units(model)
    problems = ownership_problems(root, units) + meta_problems(root, units) + collective_problems(units)
    if problems:
        raise ConfigurationError.from_problems(problems)
    whole = WholeModel.of(units, counts, root)
    first = sum(counts[:index])
    own = range(first, first + counts[index])
    materialize(units, [*own, *_sharing_with(units, own)], seed, device, root)
    units = pipeline_units(model)
    kept = {tensor for position in own for tensor in _tensors_of(units[position])}
    if (model_cut := cut_of(model)) is not None:
        kept |= set(buffers_everywhere(model, model_cut))
    others = [units[position] for position in range(len(units)) if position not in own]
    # Layers of other stages also lose the parameters that they share with this stage, except if the model's own forward
    # runs on every stage (see own_forward.py): that forward may use any module.
    own_modules = {module for position in own for module in units[position].module.modules()}
    modules = {module for unit in others for module in unit.module.modules()} if model_cut is None else set()
    gone = [t for unit in others for t in _tensors_of(unit) if t not in kept]
    whole.pruned.prune(root, index, gone, modules - own_modules)
    if len(counts) > 1:
        whole.keep(model)
    return whole


def _tensors_of(unit: Unit) -> list[Tensor]:
    return [*unit.module.parameters(), *unit.module.buffers()]


def _sharing_with(units: list[Unit], own: range) -> list[int]:
    """Return the units of other stages that share parameters with this stage.

    This stage initialises these units, too, so that all stages get the same values.
    """
    held = {id(parameter) for position in own for parameter in units[position].module.parameters()}
    others = (position for position in range(len(units)) if position not in own)
    return [p for p in others if any(id(parameter) in held for parameter in units[p].module.parameters())]


def materialize(
    units: Sequence[Unit], indices: Iterable[int], seed: int, device: torch.device, root: nn.Module | None = None
) -> None:
    """Allocate and initialise the meta tensors of the chosen units; real tensors do not change.

    Unit i is initialised with generators seeded from (seed, i), so its values do not depend on which other units this
    process has. Within a unit, ``reset_parameters()`` is called for every module whose tensors were all on the meta
    device, children before parents. Shared parameters stay shared.

    Args:
        units: all units of the model, in order.
        indices: indices of the units to be materialised.
        seed: seed of the run.
        device: device of the new tensors.
        root: module that may have other references to tensors of the units.

    Raises:
        ConfigurationError: tensors were not initialised; the message names them.
    """
    replaced: dict[Tensor, Tensor] = {}
    problems: list[str] = []
    # Go through units in order, so that on every stage a shared parameter gets the value of the last unit that has it.
    for index in sorted(indices):
        unit = units[index]
        modules = [module for module in unit.module.modules() if _replace_meta(module, replaced, device)]
        if not modules:
            continue
        with seeded(seed, device, "init", index), torch.no_grad():
            for module in _with_parents(unit.module, modules):
                if callable(reset := getattr(module, "reset_parameters", None)):
                    reset()
        tensors = [*unit.module.named_parameters(), *unit.module.named_buffers()]
        new = set(map(id, replaced.values()))
        problems += [unit.path(name) for name, t in tensors if not t.is_meta and _is_blank(t, id(t) in new)]
    for module in root.modules() if root is not None else ():
        for table, key, tensor in places_of(module):
            table[key] = replaced.get(tensor, tensor)
    if problems:
        raise ConfigurationError(
            f"meta tensors without an initialiser: {', '.join(problems)}; give their module, or the layer around it, a"
            " reset_parameters() that sets all of them, or build the model with real weights"
        )


def _replace_meta(module: nn.Module, replaced: dict[Tensor, Tensor], device: torch.device) -> bool:
    """Allocate the meta tensors of a module, without its children; return whether there were any."""
    found = False
    for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
        if parameter.is_meta and parameter not in replaced:
            blank = _blank(parameter, device)
            replaced[parameter] = parameter if fill(parameter, blank) else nn.Parameter(blank, parameter.requires_grad)
        if parameter in replaced:
            found = True
            setattr(module, name, replaced[parameter])
    for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
        if buffer.is_meta:
            found = True
            replaced[buffer] = _blank(buffer, device)
            setattr(module, name, replaced[buffer])
    return found


def _blank(like: Tensor, device: torch.device) -> Tensor:
    """Return a tensor filled with NaN, or with 0 if integer."""
    return torch.full(like.shape, float("nan") if _is_float(like) else 0, dtype=like.dtype, device=device)


def _is_blank(tensor: Tensor, is_new: bool) -> bool:
    """Return whether values are missing: some are NaN, or nothing was written to a new tensor of integers."""
    return bool(tensor.isnan().any()) if _is_float(tensor) else is_new and tensor._version == 0


def _is_float(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _with_parents(unit: nn.Module, modules: list[nn.Module]) -> list[nn.Module]:
    """Return those modules of a unit of which all tensors, also in children, were replaced; children first."""
    fresh = {id(module) for module in modules}

    def entirely_fresh(module: nn.Module) -> bool:
        owners = [m for m in module.modules() if [*m.parameters(recurse=False), *m.buffers(recurse=False)]]
        return bool(owners) and all(id(m) in fresh for m in owners)

    return [module for module in reversed(list(unit.modules())) if entirely_fresh(module)]
