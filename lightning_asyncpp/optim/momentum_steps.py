"""The step that an optimizer would take by its momentum alone, as if the gradient did not change."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW
from torch.optim.optimizer import Optimizer

from lightning_asyncpp.optim.muon import muon_step
from lightning_asyncpp.optim.muon_adamw import MuonAdamW
from lightning_asyncpp.optim.per_parameter import adam_direction

KNOWN = (MuonAdamW, AdamW, Adam, SGD)


def momentum_steps(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    """Return, for every parameter with momentum, the step (weights before minus after) along it, without weight decay.

    SGD: lr * M; Adam and AdamW: lr * M' / (sqrt(V') + eps), bias corrected; Muon: lr * scale * NewtonSchulz(M), also
    where the optimizer itself steps along Nesterov's mixture of M and the last gradient. Nothing is changed.

    Raises:
        TypeError: where the optimizer keeps its momentum is not known.
    """
    check_known(optimizer)
    if isinstance(optimizer, MuonAdamW):
        muon, adamw = optimizer.param_groups
        return {**_muon_steps(muon, optimizer.state), **_adam_steps(adamw, optimizer.state)}
    rule = _sgd_steps if isinstance(optimizer, SGD) else _adam_steps
    return {p: step for group in optimizer.param_groups for p, step in rule(group, optimizer.state).items()}


def check_known(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose momentum :func:`momentum_steps` does not know.

    Raises:
        TypeError: it is another one.
    """
    if not isinstance(optimizer, KNOWN):
        names = ", ".join(kind.__name__ for kind in KNOWN)
        raise TypeError(
            f"source='momentum' knows the momentum of {names}, not of {type(optimizer).__name__}; predict from the last"
            " step (source='last_step') or from an average of steps (smoothing)"
        )


def _sgd_steps(group: dict[str, Any], state: dict[Tensor, dict[str, Any]]) -> dict[Tensor, Tensor]:
    buffers = {p: state[p].get("momentum_buffer") for p in group["params"] if p in state}
    return {p: buffer * group["lr"] for p, buffer in buffers.items() if buffer is not None}


def _adam_steps(group: dict[str, Any], state: dict[Tensor, dict[str, Any]]) -> dict[Tensor, Tensor]:
    return {
        p: adam_direction(
            state[p]["exp_avg"], state[p]["exp_avg_sq"], state[p]["step"], group["betas"], group["eps"]
        ).mul_(group["lr"])
        for p in group["params"]
        if p in state and "exp_avg" in state[p]
    }


def _muon_steps(group: dict[str, Any], state: dict[Tensor, dict[str, Any]]) -> dict[Tensor, Tensor]:
    """Muon's own update, of weights that are zero, with a momentum that takes nothing in."""
    moving = [p for p in group["params"] if p in state and "momentum_buffer" in state[p]]
    zeros = [torch.zeros_like(p.detach()) for p in moving]
    for zero in zeros:
        zero.grad = torch.zeros_like(zero)
    buffers = {zero: {"momentum_buffer": state[p]["momentum_buffer"]} for zero, p in zip(zeros, moving)}
    muon_step({**group, "params": zeros, "momentum": 1.0, "nesterov": False, "weight_decay": 0.0}, buffers)
    return {p: zero.neg_() for p, zero in zip(moving, zeros)}
