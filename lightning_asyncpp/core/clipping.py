"""Gradient clipping over the stages of a pipeline.

Each stage computes the norms of its gradients in fp64 (:func:`norms_of`). Only the first replica's norms are used,
since all replicas have the same gradients. A shared parameter counts on one stage only. The squares are part of the
control message that all ranks sum (:class:`.Totals`), so that every stage knows the norm of the whole gradient
(:func:`gradient_norm`). At the update each stage clips its gradients by this norm (:func:`clip_by_norm`). With the
Trainer this replaces Lightning's ``clip_grad_by_norm``. With Fabric, ``fabric.clip_gradients`` gives ``max_norm``.

By default a stage steps before the control message has arrived (:meth:`.Schedule.steps_ahead`). Then it clips by the
larger one of two norms that it knows (:func:`larger`): that of the previous mini-batch's gradient, and that of its own
part of this gradient, so that a gradient that has suddenly grown is clipped, too. Parameters tied across the same
stages form a clipping group of their own, so that their copies stay equal. The first mini-batch has no previous one. So
it runs without delay, and its update waits for the norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_value_

from lightning_asyncpp.core import foreach


def norms_of(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return the 2-norm of every gradient: fp64 tensors without dimensions, on the gradients' devices."""
    real = list(gradients)
    for place, gradient in enumerate(real):
        if gradient.dtype.is_complex:
            real[place] = torch.view_as_real(gradient)
    return list(foreach.norm(real, 2, dtype=torch.float64)) if real else []


def gradient_norm(sum_of_squares: float | Tensor, weight: float) -> float | Tensor:
    """Return the norm, rounded to fp32, of a mean gradient: a summed gradient divided by ``weight``.

    Rounding hides the last bits of the fp64 sum, since its order of summation depends on the number of stages. A sum on
    a GPU gives a norm on the GPU, so that the host need not wait.
    """
    if isinstance(sum_of_squares, Tensor) and not sum_of_squares.is_cpu:
        return (sum_of_squares.sqrt() / weight).float().double()
    norm = math.sqrt(sum_of_squares) / weight if weight else 0.0
    return float(torch.tensor(norm, dtype=torch.float32))


def larger(norm_before: float, own: float | Tensor) -> float | Tensor:
    """Return the larger norm: of the previous mini-batch's whole gradient, and of a stage's own part of this one.

    On a GPU a NaN counts as 0, since such a gradient has been replaced by zeros.
    """
    return own.nan_to_num(0.0).clamp(min=norm_before) if isinstance(own, Tensor) else max(norm_before, own)


def clip_by_norm(parameters: Iterable[Tensor], norm: float | Tensor, max_norm: float) -> None:
    """Scale gradients by the factor that limits a gradient of norm ``norm`` to ``max_norm``.

    Args:
        parameters: parameters of this stage.
        norm: the norm; if it is 0, nothing is clipped.
        max_norm: largest norm.
    """
    factor = max_norm / (norm + 1e-6)  # as in torch.nn.utils.clip_grad_norm_
    if isinstance(factor, Tensor):
        factor = factor.clamp(max=1.0)
    elif not factor < 1.0:
        return
    # Scale one by one, and by a tensor as by a number: torch._foreach_mul_ would round the factor to bf16.
    for gradient in (p.grad for p in parameters if p.grad is not None):
        if isinstance(factor, Tensor):
            gradient.mul_(factor.to(torch.promote_types(gradient.dtype, torch.float32)).view([1] * gradient.dim()))
        else:
            gradient.mul_(factor)


def clip_values(parameters: Iterable[Tensor], limit: float) -> None:
    """Clamp every element of the gradients; without gradients, as on some stages, torch would raise an error."""
    if with_gradient := [parameter for parameter in parameters if parameter.grad is not None]:
        clip_grad_value_(with_gradient, limit)
