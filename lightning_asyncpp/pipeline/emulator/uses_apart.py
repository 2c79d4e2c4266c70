"""A parameter that several layers share, with a gradient for each: a pipeline sums them apart and then adds them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from lightning_asyncpp.pipeline.errors import ConfigurationError
from lightning_asyncpp.pipeline.units import Unit, pipeline_units


@contextmanager
def uses_apart(model: nn.Module | None) -> Iterator[list[tuple[nn.Parameter, nn.Parameter]]]:
    """Let every unit that shares a trainable parameter with one before it hold another one with the same memory.

    Args:
        model: what a pipeline would cut; of one that it could not, or None, nothing is changed.

    Yields:
        (parameter, the other one) in the order of units.
    """
    uses: list[tuple[nn.Parameter, nn.Parameter]] = []
    places: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
    seen: set[nn.Parameter] = set()
    for unit in _units(model):
        own = dict.fromkeys(unit.module.parameters())
        others = {p: nn.Parameter(p.data) for p in own if p in seen and p.requires_grad}
        uses += others.items()
        seen.update(own)
        for module in unit.module.modules() if others else ():
            named = module.named_parameters(recurse=False, remove_duplicate=False)
            places += [(module, name, p, others[p]) for name, p in named if p in others]
    for module, name, _, other in places:  # after all were found: one module may be in several units
        setattr(module, name, other)
    try:
        yield uses
    finally:
        for module, name, parameter, _ in places:
            setattr(module, name, parameter)


def _units(model: nn.Module | None) -> list[Unit]:
    try:
        return pipeline_units(model) if model is not None else []
    except ConfigurationError:
        return []
