"""Whether an optimizer can be a stage's, in its step and in how its state is saved, in words for the user.

Both are tried on small copies before training.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_asyncpp.core.optimizers.configured import name_of
from lightning_asyncpp.core.optimizers.probe import (
    GLOBAL,
    LOSS,
    RANDOM,
    SEVERAL,
    TALKS,
    Verdict,
    aside,
    examine,
    is_known,
    step,
)
from lightning_asyncpp.core.optimizers.small_copy import NotExaminedError, SmallCopy
from lightning_asyncpp.core.optimizers.state_by_name import by_parameter, load_by_parameter
from lightning_asyncpp.core.optimizers.steps import no_closure, several_gradients

_CUT = {"partition": [1]}
_STEPS = 3
_OTHERWISE = "or strategy='delayed_gradient' in one process, which computes with the whole model's"
_REASONS = {
    GLOBAL: (
        "computes over all of its parameters (other gradients of some of them, or leaving them out, changed the step of"
        " the rest), but every stage has an optimizer of its own, and would compute over the stage's; use an optimizer"
        " that treats every parameter by itself, the option that switches this off (max_grad_norm=0, and"
        f" gradient_clip_val of the Trainer or fabric.clip_gradients), {_OTHERWISE}"
    ),
    RANDOM: (
        "draws random numbers in its step: every stage and every replica would draw its own, and weights that are the"
        " same ones would drift apart; use an optimizer, or options, that draw none,"
        f" {_OTHERWISE}"
    ),
    LOSS: (
        "computes with the loss that its closure returns, which no stage knows when it steps; use an optimizer that"
        f" needs gradients only, {_OTHERWISE}"
    ),
    TALKS: (
        "communicates with other processes in its step, but these hold other stages; use an optimizer that steps by"
        f" itself: gradients are summed over replicas before, {_OTHERWISE}"
    ),
}


def stage_problems(optimizer: Optimizer, with_closure: bool) -> list[str]:
    """Why an optimizer cannot step one stage of a model; other ranks may find what this one does not.

    Args:
        optimizer: over this stage's parameters; it stays as it is.
        with_closure: whether its step is given a closure that does more than to return something.
    """
    if is_known(optimizer) and not isinstance(optimizer, LBFGS):
        return []
    verdict = examine(optimizer)
    if verdict.kind == SEVERAL:
        return [several_gradients(optimizer)]
    if verdict.kind:
        return [f"{name_of(optimizer)} {_REASONS[verdict.kind]}"]
    if problems := state_problems(optimizer):
        return problems
    if verdict.unknown:
        _warn(optimizer, verdict)
    elif with_closure and not verdict.calls_closure:
        return [no_closure(optimizer)]
    return []


def sparse_problems(model: nn.Module) -> list[str]:
    """Layers of this stage whose gradients would be sparse, which are not summed over micro-batches and ranks."""
    return [
        f"{name or 'the model'} ({type(layer).__name__}) has sparse=True: gradients are summed, counted and clipped"
        " over micro-batches and stages, which is done with dense ones only; make it with sparse=False"
        for name, layer in model.named_modules()
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse and layer.weight.requires_grad
    ]


def version_problems(optimizer: Optimizer) -> list[str]:
    """Why an optimizer cannot take gradients of which a part was taken at older weights than the rest."""
    find = getattr(optimizer, "problems_of_fractions", None)  # of a correction
    return find() if callable(find) else []


def delayed_problems(optimizer: Optimizer) -> list[str]:
    """Why an optimizer over the whole model cannot take delayed gradients."""
    if is_known(optimizer) and not isinstance(optimizer, LBFGS):
        return []
    return [several_gradients(optimizer)] if examine(optimizer).kind == SEVERAL else []


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


def _warn(optimizer: Optimizer, verdict: Verdict) -> None:
    rank_zero_warn(
        f"{name_of(optimizer)} could not be examined before training: {verdict.unknown}. If its step computes over all"
        " of its parameters (a norm, an estimated step size) or draws random numbers, stages compute something else"
        " than the whole model would: compare a short run with strategy='delayed_gradient' and the same micro_batches"
    )
