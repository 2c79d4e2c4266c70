"""Whether two stages take the same: then one of them is looked at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from lightning_asyncpp.pipeline.cut.units import Unit

_HOLDERS = ("_parameters", "_buffers", "_modules")


def alike(first: Sequence[Unit], second: Sequence[Unit]) -> bool:
    """Whether layers of the same classes stand there in the same order, alike in everything that they hold.

    What cannot be compared counts as different.
    """
    if len(first) != len(second) or any(a.function is not b.function for a, b in zip(first, second)):
        return False
    return _described(first) == _described(second) and all(
        _same_attributes(a, b)
        for one, other in zip(first, second)
        for a, b in zip(one.module.modules(), other.module.modules())
    )


def _described(units: Sequence[Unit]) -> list[Any]:
    """Names and classes of all layers, shapes of what they hold, and which of it is the same tensor."""
    numbers: dict[int, int] = {}
    found: list[Any] = []
    for unit in units:
        for name, module in unit.module.named_modules(remove_duplicate=False):
            found.append((name, type(module), module.training))
        held = [*unit.module.named_parameters(remove_duplicate=False), *unit.module.named_buffers()]
        for name, tensor in held:
            number = numbers.setdefault(id(tensor), len(numbers))
            found.append((name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad, number))
    return found


def _same_attributes(first: nn.Module, second: nn.Module) -> bool:
    mine, others = ({k: v for k, v in vars(m).items() if k not in _HOLDERS} for m in (first, second))
    return mine.keys() == others.keys() and all(_same(mine[key], others[key]) for key in mine)


def _same(first: Any, second: Any) -> bool:
    if first is second:
        return True
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return False
    try:
        return type(first) is type(second) and bool(first == second)
    except Exception:  # comparing is the user's code
        return False
