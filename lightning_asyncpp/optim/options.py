"""Check the options of optimizers; a name means the same in all optimizers of this package."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

DTYPES = ("bfloat16", "float32", "float64")
BUFFER_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
LR_ADJUSTMENTS = ("match_rms_adamw", "original")

Rule = tuple[Callable[[Any], bool], str]
"""Whether a value is valid, and what it must be."""

_AT_LEAST_0: Rule = (lambda x: 0 <= x < math.inf, "at least 0")
_DECAY_RATE: Rule = (lambda x: 0 <= x < 1, "in [0, 1)")
_TWO_DECAY_RATES: Rule = (lambda x: len(x) == 2 and all(0 <= beta < 1 for beta in x), "two numbers in [0, 1)")
_COUNT: Rule = (lambda x: x >= 1 and x == int(x), "a whole number of at least 1")

_RULES: dict[str, Rule] = {
    **dict.fromkeys(("lr", "weight_decay", "eps", "adamw_eps", "strength", "horizon", "ahead"), _AT_LEAST_0),
    **dict.fromkeys(("adamw_lr", "adamw_weight_decay"), _AT_LEAST_0),
    **dict.fromkeys(("momentum", "beta2", "shampoo_beta"), _DECAY_RATE),
    **dict.fromkeys(("betas", "adamw_betas"), _TWO_DECAY_RATES),
    **dict.fromkeys(("newton_schulz_steps", "precondition_frequency", "max_precondition_dim"), _COUNT),
    "coefficients": (lambda x: len(x) == 3, "three numbers"),
    "adjust_lr": (lambda x: x in LR_ADJUSTMENTS, f"one of {', '.join(LR_ADJUSTMENTS)}"),
    "buffer_dtype": (lambda x: x in BUFFER_DTYPES, f"None or one of {', '.join(BUFFER_DTYPES)}"),
    "newton_schulz_dtype": (lambda x: x in DTYPES, f"one of {', '.join(DTYPES)}"),
}


def check_options(optimizer: object, options: Mapping[str, Any]) -> None:
    """Raise ValueError for the first option that cannot be used; None stands for a default."""
    for name, value in options.items():
        if name not in _RULES or value is None:
            continue
        is_valid, wanted = _RULES[name]
        try:
            valid = is_valid(value)
        except (TypeError, ValueError, OverflowError):  # of another type
            valid = False
        if not valid:
            raise ValueError(f"{type(optimizer).__name__} cannot use {name}={value!r}. It must be {wanted}.")
