"""What optimizers and corrections may be given, and the words for what they may not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_asyncpp.optim.newton_schulz import FORMS

Rule = tuple[Callable[[Any], bool], str]
"""Tells whether a value will do, and what it must be."""

DTYPES = ("bfloat16", "float32", "float64")
LR_ADJUSTMENTS = ("match_rms_adamw", "original")
BUFFER_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def decay_rates(count: int) -> Rule:
    """Return the rule for ``count`` decay rates of running averages."""
    words = {2: "two", 3: "three"}[count]
    return (lambda x: len(x) == count and all(0 <= beta < 1 for beta in x), f"must be {words} numbers in [0, 1)")


def one_of(choices: tuple[str, ...]) -> Rule:
    """Return the rule for one of some words."""
    return (lambda x: x in choices, f"must be one of {', '.join(choices)}")


_AT_LEAST_0: Rule = (lambda x: 0 <= x < math.inf, "must be at least 0")
_DECAY_RATE: Rule = (lambda x: 0 <= x < 1, "must be in [0, 1)")
_COUNT: Rule = (lambda x: x >= 1 and x == int(x), "must be a whole number of at least 1")

RULES: dict[str, Rule] = {
    "lr": _AT_LEAST_0,
    "weight_decay": _AT_LEAST_0,
    "eps": _AT_LEAST_0,
    "gamma": _AT_LEAST_0,
    "momentum": _DECAY_RATE,
    "beta2": _DECAY_RATE,
    "betas": decay_rates(2),
    "newton_schulz_steps": (lambda x: 1 <= x < 100, "must be between 1 and 99"),
    "coefficients": (lambda x: len(x) == 3, "must be three numbers"),
    "adjust_lr": one_of(LR_ADJUSTMENTS),
    "newton_schulz_dtype": one_of(DTYPES),
    "newton_schulz_form": one_of(FORMS),
    "shampoo_beta": (lambda x: x is None or 0 <= x < 1, "must be in [0, 1), or None for the second of betas"),
    "precondition_frequency": _COUNT,
    "max_precondition_dim": _COUNT,
}
"""By name: a hyper-parameter means the same in all optimizers of this package."""


def invalid(hyper: Mapping[str, Any], rules: Mapping[str, Rule] = RULES) -> dict[str, str]:
    """Return the hyper-parameters that cannot be used, each with what it must be."""
    return {key: mend for key, (valid, mend) in rules.items() if key in hyper and not _holds(valid, hyper[key])}


def raise_problems(optimizer: str, problems: Iterable[str]) -> None:
    """Raise one error that names all problems of an optimizer or a correction, if there are any.

    Raises:
        ValueError: ``problems`` is not empty.
    """
    lines = [f"  - {problem}" for problem in dict.fromkeys(problems)]
    if lines:
        raise ValueError("\n".join([f"{optimizer} cannot be set up:", *lines]))


def _holds(valid: Callable[[Any], bool], value: Any) -> bool:
    try:
        return bool(valid(value))
    except (TypeError, ValueError, OverflowError):  # of another type, or not a finite number
        return False


def check_base(base: object) -> None:
    """Refuse what does not make an optimizer.

    Raises:
        TypeError: ``base`` is not callable.
    """
    if not callable(base):
        raise TypeError(
            f"`base` must be a callable that makes an optimizer from parameters, got {type(base).__name__}: pass the "
            "class or functools.partial(torch.optim.AdamW, lr=1e-3) instead of an optimizer that is already made"
        )


def buffer_dtype_problems(buffer_dtype: str | None) -> list[str]:
    """What is wrong with a correction's ``buffer_dtype``."""
    if buffer_dtype in (None, *BUFFER_DTYPES):
        return []
    return [f"buffer_dtype must be None or one of {', '.join(BUFFER_DTYPES)}, got {buffer_dtype!r}"]


def check_lent(p: Tensor, lent: Tensor | None) -> None:
    """Refuse what cannot be the weights of ``p`` before a step, in memory of its own.

    Raises:
        ValueError: says why.
    """
    if lent is None:
        raise ValueError(f"weights_before() lacks a parameter of shape {tuple(p.shape)} that has a gradient")
    if lent.shape != p.shape or lent.dtype != p.dtype or lent.device != p.device:
        raise ValueError(
            f"the lent weights are {tuple(lent.shape)} {lent.dtype} on {lent.device}, their parameter is "
            f"{tuple(p.shape)} {p.dtype} on {p.device}"
        )
    # Not data_ptr(), which tensors without memory (`asyncpp plan`) do not have.
    same_storage = lent.untyped_storage() is p.untyped_storage()
    if p.numel() and same_storage and lent.storage_offset() == p.storage_offset():
        raise ValueError("the lent weights are the parameter itself: lend a copy that the step leaves as it is")
