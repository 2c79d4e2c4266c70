"""A parameter that several layers share, with a gradient for each: a pipeline sums them apart and then adds them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from lightning_asyncpp.pipeline.cut.units import Unit, pipeline_units
from lightning_asyncpp.pipeline.errors import ConfigurationError

_Place = tuple[nn.Module, str, nn.Parameter]


@contextmanager
def uses_apart(model: nn.Module | None) -> Iterator[list[tuple[nn.Parameter, nn.Parameter]]]:
    """Let every unit that shares a trainable parameter with one before it run with another one with the same memory.

    A module of several units gets that of each in turn, one outside of them that of the last unit that began to run.

    Args:
        model: what a pipeline would cut; of one that it could not, or None, nothing is changed.

    Yields:
        (parameter, the other one) in the order of units.
    """
    units = _units(model)
    uses, in_use = _others(units)
    if model is None or not uses:
        yield []
        return
    shared = {parameter for parameter, _ in uses}
    inside = {module for unit in units for module in unit.module.modules()}
    places = [place for place in _places(model) if place[2] in shared]
    turns: dict[nn.Module, list[list[_Place]]] = {}  # one module may be several units
    for unit, now in zip(units, in_use):
        own = set(unit.module.modules())
        turn = [(m, name, now.get(p, p)) for m, name, p in places if m in own or m not in inside]
        turns.setdefault(unit.module, []).append(turn)
    hooks = [module.register_forward_pre_hook(_taking(itertools.cycle(in_turn))) for module, in_turn in turns.items()]
    try:
        yield uses
    finally:
        for hook in hooks:
            hook.remove()
        _put(places)


def _others(
    units: list[Unit],
) -> tuple[list[tuple[nn.Parameter, nn.Parameter]], list[dict[nn.Parameter, nn.Parameter]]]:
    """The further parameters; and for every unit, what stands for each parameter while it runs."""
    uses: list[tuple[nn.Parameter, nn.Parameter]] = []
    in_use: list[dict[nn.Parameter, nn.Parameter]] = []
    now: dict[nn.Parameter, nn.Parameter] = {}
    for unit in units:
        own = dict.fromkeys(unit.module.parameters())
        others = {p: nn.Parameter(p.data) for p in own if p in now and p.requires_grad}
        uses += others.items()
        now = {**now, **{p: p for p in own}, **others}
        in_use.append(now)
    return uses, in_use


def _places(model: nn.Module) -> list[_Place]:
    return [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    ]


def _taking(in_turn: Iterator[list[_Place]]) -> Callable[..., None]:
    return lambda *_: _put(next(in_turn))


def _put(places: list[_Place]) -> None:
    for module, name, parameter in places:
        setattr(module, name, parameter)


def _units(model: nn.Module | None) -> list[Unit]:
    try:
        return pipeline_units(model) if model is not None else []
    except ConfigurationError:
        return []
