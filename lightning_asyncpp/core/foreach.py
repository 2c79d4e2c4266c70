"""Elementwise work on all tensors of a stage at once, in a few kernels where torch has them, and clipping.

torch documents ``torch.foreach`` from version 2.15 on and keeps the underscored names beside it, which older versions
have alone; they are used here and nowhere else. None of them takes an empty list.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_value_

from lightning_asyncpp.dependencies import required
from lightning_asyncpp.errors import ConfigurationError

_PURPOSE = "work on many tensors at once"
divide_ = required(torch, "_foreach_div_", _PURPOSE)
"""Divide every tensor in place, by one number."""
copy_ = required(torch, "_foreach_copy_", _PURPOSE)
"""Copy every source into the destination at its position."""
norm = required(torch, "_foreach_norm", _PURPOSE)
"""2-norm of every tensor, as a list of tensors without dimensions, computed in ``dtype``."""


def check_norm_type(norm_type: float) -> None:
    """Refuse norms other than the 2-norm: the control message carries a sum of squares.

    Raises:
        ConfigurationError: it is another one.
    """
    if norm_type != 2.0:
        raise ConfigurationError(
            f"norm_type={norm_type}: over pipeline stages gradients are clipped by their 2-norm only; leave it out"
        )


def clip_coefficient(norm: float, max_norm: float) -> float:
    """Factor of ``torch.nn.utils.clip_grad_norm_`` for a gradient of norm ``norm``."""
    return min(1.0, max_norm / (norm + 1e-6))


def clip_by_norm(parameters: Iterable[Tensor], norm: float, max_norm: float) -> None:
    """Scale the gradients of a stage, as part of one of norm ``norm`` over all stages, to a norm of ``max_norm``."""
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
