"""Gradient clipping over the stages of a pipeline.

Each stage takes the norms of its own gradients in fp64 (:func:`norms_of`); of replicas and shared parameters, one
counts. The control message of an update adds up their squares, so that every stage knows one norm of the whole gradient
(:func:`gradient_norm`). It clips by that norm, in place, when the update is applied (:func:`clip_by_norm`), between the
optimizer's other hooks: a Trainer strategy does so in place of Lightning's ``clip_grad_by_norm``, a Fabric strategy by
what ``fabric.clip_gradients`` asked for.

A stage that steps before all have agreed (the default, :meth:`.Schedule.steps_ahead`) does not know the norm of its
update yet: its control message has that of the mini-batch before. The very first has no delay, so that there is one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_value_

from lightning_asyncpp.core import foreach
from lightning_asyncpp.errors import ConfigurationError


def norms_of(gradients: Sequence[Tensor]) -> list[Tensor]:
    """2-norm of every gradient: tensors of fp64 without dimensions, where the gradients are."""
    return list(foreach.norm(gradients, 2, dtype=torch.float64)) if gradients else []


def gradient_norm(sum_of_squares: float, weight: float) -> float:
    """Norm of the mean gradient from the squares of the summed one, rounded to fp32.

    Rounding hides the last bits of the fp64 sum, whose order depends on the number of stages.
    """
    norm = math.sqrt(sum_of_squares) / weight if weight else 0.0
    return float(torch.tensor(norm, dtype=torch.float32))


def clip_coefficient(norm: float, max_norm: float) -> float:
    """Factor of ``torch.nn.utils.clip_grad_norm_`` for a gradient of norm ``norm``."""
    return min(1.0, max_norm / (norm + 1e-6))


def clip_by_norm(parameters: Iterable[Tensor], norm: float, max_norm: float) -> None:
    """Scale the gradients of a stage by what takes the whole gradient's norm down to ``max_norm``.

    Args:
        parameters: of this stage.
        norm: of the gradient over all stages, or of the one before; 0 clips nothing.
        max_norm: the largest norm.
    """
    factor = clip_coefficient(norm, max_norm)
    if factor < 1.0:
        # Each on its own: torch._foreach_mul_ would round the factor to bf16 where the gradients are.
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def clip_values(parameters: Iterable[Tensor], limit: float) -> None:
    """Limit every element of the gradients that there are: a stage may have none in an update, which torch refuses."""
    if with_gradient := [parameter for parameter in parameters if parameter.grad is not None]:
        clip_grad_value_(with_gradient, limit)


def check_norm_type(norm_type: float) -> None:
    """Refuse norms other than the 2-norm: the control message carries a sum of squares.

    Raises:
        ConfigurationError: it is another one.
    """
    if norm_type != 2.0:
        raise ConfigurationError(
            f"norm_type={norm_type}: over pipeline stages gradients are clipped by their 2-norm only; leave it out"
        )
