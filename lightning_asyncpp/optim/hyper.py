"""What hyper-parameters of optimizers may be, and the words for those that may not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning_asyncpp.optim.newton_schulz import FORMS

Rule = tuple[Callable[[Any], bool], str]
"""Tells whether a value will do, and what it must be."""

DTYPES = ("bfloat16", "float32", "float64")
LR_ADJUSTMENTS = ("match_rms_adamw", "original")


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
    """Raise one error that names all problems, if there are any.

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
