"""Constants in place of what torch draws at random, so that a step does the same with a batch and with its pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class FixedDraws(TorchDispatchMode):
    """Meanwhile torch draws the same number for everything: of a distribution its middle, of a dropout that all stays.

    What is not known here, such as a permutation, is drawn as ever.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        fix = _FIXES.get(func.overloadpacket.__name__) if torch.Tag.nondeterministic_seeded in func.tags else None
        return result if fix is None else fix(result, args, kwargs or {})


def _numbers(args: tuple) -> list[float]:
    """Those among the arguments, in order."""
    return [argument for argument in args if isinstance(argument, (int, float)) and not isinstance(argument, bool)]


def _middle_of_range(drawn: Tensor, args: tuple, kwargs: Mapping[str, Any]) -> Tensor:
    low, high = (*_numbers(args), kwargs.get("from", 0.0), kwargs.get("to", 1.0))[:2]
    return drawn.fill_((low + high) / 2)


def _half(drawn: Tensor, args: tuple, kwargs: Mapping[str, Any]) -> Tensor:
    return drawn.fill_(0.5)


def _mean(drawn: Tensor, args: tuple, kwargs: Mapping[str, Any]) -> Tensor:
    given = args[0] if isinstance(args[0], Tensor) and args[0] is not drawn else None  # torch.normal of a tensor
    return drawn.copy_(given) if given is not None else drawn.fill_((*_numbers(args), kwargs.get("mean", 0.0))[0])


def _zero(drawn: Tensor, args: tuple, kwargs: Mapping[str, Any]) -> Tensor:
    return drawn.zero_()


def _lowest(drawn: Tensor, args: tuple, kwargs: Mapping[str, Any]) -> Tensor:
    """The lowest number if two are given, which are a range; 0 if one is, which is its end."""
    numbers = _numbers(args)
    return drawn.fill_(numbers[0] if len(numbers) > 1 else 0)


def _kept(drawn: Tensor, args: tuple, kwargs: Mapping[str, Any]) -> Tensor:
    return drawn.fill_(1)


def _dropout(drawn: tuple[Tensor, Tensor], args: tuple, kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Scaled as ever, which its backward does, too."""
    output, mask = drawn
    return output.copy_(args[0] / (1.0 - args[1])), mask.fill_(1)


_FIXES: Mapping[str, Callable[[Any, tuple, Mapping[str, Any]], Any]] = {
    "rand": _half,
    "rand_like": _half,
    "uniform_": _middle_of_range,
    "randn": _zero,
    "randn_like": _zero,
    "normal": _mean,
    "normal_": _mean,
    "randint": _lowest,
    "randint_like": _lowest,
    "random_": _lowest,
    "bernoulli": _kept,
    "bernoulli_": _kept,
    "native_dropout": _dropout,
}
