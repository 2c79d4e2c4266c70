"""Whether the state of an optimizer can be saved and loaded by names of parameters, tried before training."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_asyncpp.pipeline.checkpoint.optimizer_state import by_parameter, load_by_parameter
from lightning_asyncpp.pipeline.optimizers.naming import name_of
from lightning_asyncpp.pipeline.optimizers.probe import aside, step
from lightning_asyncpp.pipeline.optimizers.small_copy import NotExaminedError, SmallCopy

_CUT = {"partition": [1]}
_STEPS = 3


def state_problems(optimizer: Optimizer) -> list[str]:
    """Why checkpoints could not hold an optimizer's state so that any stage can take up its part.

    A small copy takes some steps, another one takes up its state by parameter, and both go on.
    """
    if reason := _missing(optimizer.state_dict()):
        return [_refusal(optimizer, reason)]
    with aside():
        try:
            reason = _lost(optimizer)
        except NotExaminedError:  # said elsewhere
            return []
    return [_refusal(optimizer, reason)] if reason else []


def _missing(state: Any) -> str:
    if not isinstance(state, Mapping):
        return f"it is a {type(state).__name__}"
    missing = [name for name in ("state", "param_groups") if name not in state]
    return f"it has no {' and no '.join(map(repr, missing))}" if missing else ""


def _lost(optimizer: Optimizer) -> str:
    first, by_name, as_it_was = (SmallCopy(optimizer) for _ in range(3))
    names = [_named(small) for small in (first, by_name)]
    _advance(first, 0)
    try:
        saved = by_parameter(first.optimizer, names[0], 0, _CUT)
        load_by_parameter(by_name.optimizer, names[1], _CUT, saved, lambda table, name: table.get(name))
    except Exception as error:
        return f"taking it up by parameter fails ({type(error).__name__}: {error})"
    try:
        as_it_was.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    except Exception:
        return ""  # it could not be loaded without a pipeline either
    for other in (by_name, as_it_was):
        _take_weights(other, first)
    for small in (first, by_name, as_it_was):
        _advance(small, _STEPS)
    if _same(first, by_name) or not _same(first, as_it_was):
        return ""
    return "taken up by parameter it is not what it was"


def _named(small: SmallCopy) -> dict[str, Tensor]:
    held = [p for group in small.optimizer.param_groups for p in group["params"]]
    return {str(number): p for number, p in enumerate(held)}


def _advance(small: SmallCopy, start: int) -> None:
    small.let_train()
    for number in range(start, start + _STEPS):
        step(small, number)


def _take_weights(small: SmallCopy, other: SmallCopy) -> None:
    with torch.no_grad():
        for (mine, _), (value, _) in zip(small.trained, other.trained):
            mine.copy_(value)


def _same(first: SmallCopy, second: SmallCopy) -> bool:
    pairs = zip(first.trained, second.trained)
    return all(torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) for (a, _), (b, _) in pairs)


def _refusal(optimizer: Optimizer, reason: str) -> str:
    return (
        f"the state_dict() of {name_of(optimizer)} cannot be saved by parameters of a stage: {reason}; no checkpoint"
        " could be written, or gone on from: use what it wraps, if it is a wrapper, another optimizer with the form of"
        " torch's ('state' and 'param_groups', parameters by number), or strategy='delayed_gradient'"
    )
