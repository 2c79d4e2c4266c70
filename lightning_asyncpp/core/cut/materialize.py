"""Turning layers on the meta device into initialised ones, each from its own seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from lightning_asyncpp.core.cut.pruned import fill, places_of
from lightning_asyncpp.core.cut.units import Unit
from lightning_asyncpp.core.randomness import derive, seeded
from lightning_asyncpp.errors import ConfigurationError


def materialize(
    units: Sequence[Unit], indices: Iterable[int], seed: int, device: torch.device, root: nn.Module | None = None
) -> None:
    """Allocate and initialise the meta tensors of the chosen units; real tensors are kept as they are.

    Unit i is initialised under generators seeded from (seed, i): its values do not depend on which other units live in
    this process. Within a unit, ``reset_parameters()`` of every module that held meta tensors is called, children
    before parents. A parameter shared by several modules stays shared.

    Args:
        units: all units of the model, in order; each has ``name`` and ``module``.
        indices: which of them to materialise.
        seed: the run's seed.
        device: where the tensors are allocated.
        root: what may have other names for what is in the units.

    Raises:
        ConfigurationError: a tensor was left without a value, with the names of all such tensors.
    """
    replaced: dict[Tensor, Tensor] = {}
    problems: list[str] = []
    for index in sorted(indices):  # a parameter that several units share has the last one's word, on every stage
        unit = units[index]
        modules = [module for module in unit.module.modules() if _replace_meta(module, replaced, device)]
        if not modules:
            continue
        owners = _with_parents(unit.module, modules)
        initialize = partial(_initialize, owners, derive(seed, "init", index), device)
        initialize()
        masks = _unset_masks(unit.module, modules, initialize)
        problems += [unit.path(name) for name in [*_unset(unit.module), *masks]]
    for module in root.modules() if root is not None else ():
        for table, key, tensor in places_of(module):
            table[key] = replaced.get(tensor, tensor)
    if problems:
        raise ConfigurationError(
            f"meta tensors without an initialiser: {', '.join(problems)}; give their module, or the unit around it, a"
            " reset_parameters() that sets all of them, or build the model with real weights"
        )


def _initialize(owners: Sequence[nn.Module], seed: int, device: torch.device) -> None:
    with seeded(seed, device), torch.no_grad():
        for module in owners:
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()


def _unset_masks(unit: nn.Module, modules: Sequence[nn.Module], initialize: Callable[[], None]) -> list[str]:
    """Boolean buffers that the initialiser leaves as they were: no value marks them, so it runs on both."""
    fresh = {id(buffer) for module in modules for buffer in module.buffers(recurse=False)}
    masks = {n: b for n, b in unit.named_buffers() if b.dtype == torch.bool and b.numel() and id(b) in fresh}
    if not masks:
        return []
    first = {name: mask.clone() for name, mask in masks.items()}
    for mask in masks.values():
        mask.fill_(True)
    initialize()
    now = dict(unit.named_buffers())
    return [name for name, mask in first.items() if not torch.equal(mask, now[name])]


def _replace_meta(module: nn.Module, replaced: dict[Tensor, Tensor], device: torch.device) -> bool:
    """Give the meta tensors that ``module`` itself owns memory, and a mark; returns whether there were any."""
    found = False
    for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
        if parameter.is_meta and parameter not in replaced:
            marked = _marked(parameter, device)
            replaced[parameter] = (
                parameter if fill(parameter, marked) else nn.Parameter(marked, parameter.requires_grad)
            )
        if parameter in replaced:
            found = True
            setattr(module, name, replaced[parameter])
    for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
        if buffer.is_meta:
            found = True
            replaced[buffer] = _marked(buffer, device)
            setattr(module, name, replaced[buffer])
    return found


def _marked(like: Tensor, device: torch.device) -> Tensor:
    return torch.full(like.shape, _mark(like.dtype), dtype=like.dtype, device=device)


def _mark(dtype: torch.dtype) -> float | int | bool:
    # A value that no initialiser would write into a whole tensor.
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).max - 86


def _with_parents(unit: nn.Module, modules: list[nn.Module]) -> list[nn.Module]:
    """Modules of the unit whose tensors were all replaced, children before parents."""
    fresh = {id(module) for module in modules}

    def entirely_fresh(module: nn.Module) -> bool:
        owners = [m for m in module.modules() if _owns_tensors(m)]
        return bool(owners) and all(id(m) in fresh for m in owners)

    return [module for module in reversed(list(unit.modules())) if entirely_fresh(module)]


def _owns_tensors(module: nn.Module) -> bool:
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return bool(own)


def _unset(module: nn.Module) -> list[str]:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return [name for name, tensor in tensors if tensor.numel() and not tensor.is_meta and _still_marked(tensor)]


def _still_marked(tensor: Tensor) -> bool:
    if tensor.dtype == torch.bool:
        return False
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return bool(torch.isnan(tensor).any())
    return bool((tensor == _mark(tensor.dtype)).all())
