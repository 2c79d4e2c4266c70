"""One optimizer for a whole model: NorMuon for hidden matrices, AdamW for everything else."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lightning_asyncpp.optim.composite import MatrixAdamW
from lightning_asyncpp.optim.muon import ADDED_LATER, REMOVED, Stack, lr_scale, muon_step
from lightning_asyncpp.optim.newton_schulz import COEFFICIENTS
from lightning_asyncpp.optim.split import DEFAULT_ADAMW_NAMES

RMS = 0.2
"""Root mean square of the entries of an update with ``match_rms_adamw``, in units of the learning rate."""


class NorMuonAdamW(MatrixAdamW):
    """Muon whose neurons take steps of equal size, for hidden weight matrices, and AdamW for the rest.

    NorMuon (Li et al. 2025, arXiv 2510.05491, Algorithm 1): orthogonalised updates move some neurons much more than
    others. So each row of the orthogonalised momentum O is divided by the root of a running mean of its squares, and
    the matrix is brought back to the size of Muon's update::

        M = momentum * M + (1 - momentum) * G
        O = NewtonSchulz(M)                                   with nesterov: of (1 - momentum) * G + momentum * M
        v = beta2 * v + (1 - beta2) * mean_over_row(O * O)    one number per neuron
        N = O / (sqrt(v) + eps)
        W = W - lr * weight_decay * W - lr * 0.2 * sqrt(rows * columns) / |N|_F * N

    A bias correction of v would cancel in the last line. Everything but v is as in
    :class:`~lightning_asyncpp.optim.MuonAdamW`: which parameter goes where, the two parameter groups (here ``normuon``
    and ``adamw``), the weights of experts (experts, out, in) one by one, and parameters without a gradient. The
    paper's listing has no Nesterov momentum, the authors' code does.

    Memory: that of MuonAdamW and one number per neuron.

    Args:
        params: ``module.named_parameters()``, or groups ``{"params": ..., "algorithm": "normuon" | "adamw"}`` of
            tensors with or without names. Unnamed tensors alone do only if none of them is a matrix.
        lr: step size of NorMuon; with ``match_rms_adamw`` it is on AdamW's scale.
        adamw_lr: step size of AdamW; None: ``lr``.
        momentum: decay of the gradient average, in [0, 1).
        beta2: decay of the average of each neuron's squares, in [0, 1).
        eps: added to the root of that average.
        nesterov: look one momentum step ahead.
        weight_decay: decoupled decay per step in units of the learning rate, for both algorithms.
        adamw_weight_decay: the same for AdamW alone; None: ``weight_decay``.
        adamw_betas: decay of AdamW's averages of the gradient and of its square.
        adamw_eps: added to AdamW's denominator.
        newton_schulz_steps: iterations per matrix.
        coefficients: of the quintic iteration.
        adjust_lr: "match_rms_adamw": the entries of an update have root mean square 0.2 * lr, as in the paper's
            listing; "original": the update keeps the norm of O and is scaled by sqrt(max(1, fan_out / fan_in)), as in
            the authors' code.
        newton_schulz_dtype: "bfloat16", "float32" or "float64", or the torch dtype.
        adamw_names: regular expression searched in parameter names; matching parameters go to AdamW.
        batched: join equal shapes into one product. None: on GPUs, unless deterministic algorithms are asked for.
        newton_schulz_form: "direct", as torch; "gram" (arXiv 2505.16932, appendix F): fewer operations for matrices
            that are not square, other rounding. See :func:`lightning_asyncpp.optim.newton_schulz.orthogonalize`.

    Raises:
        ValueError: names all problems of the configuration at once.
    """

    matrix_algorithm = "normuon"
    added_later = ADDED_LATER
    removed = REMOVED

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        adamw_lr: float | None = None,
        momentum: float = 0.95,
        beta2: float = 0.95,
        eps: float = 1e-10,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        adamw_weight_decay: float | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        newton_schulz_steps: int = 5,
        coefficients: tuple[float, float, float] = COEFFICIENTS,
        adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
        newton_schulz_dtype: str | torch.dtype = "bfloat16",
        adamw_names: str = DEFAULT_ADAMW_NAMES,
        batched: bool | None = None,
        newton_schulz_form: Literal["direct", "gram"] = "direct",
    ) -> None:
        normuon = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "beta2": beta2,
            "eps": eps,
            "nesterov": nesterov,
            "newton_schulz_steps": newton_schulz_steps,
            "coefficients": coefficients,
            "adjust_lr": adjust_lr,
            "newton_schulz_dtype": newton_schulz_dtype,
            "batched": batched,
            "newton_schulz_form": newton_schulz_form,
        }
        adamw = {"lr": adamw_lr, "weight_decay": adamw_weight_decay, "betas": adamw_betas, "eps": adamw_eps}
        super().__init__(params, adamw_names, normuon, adamw)

    def step_matrices(self, group: dict[str, Any]) -> None:
        """Take NorMuon's step."""
        for p in group["params"]:
            if p.grad is not None and "second_moment_buffer" not in self.state[p]:
                self.state[p]["second_moment_buffer"] = torch.zeros_like(p.detach().narrow(-1, 0, 1))
        muon_step(group, self.state, scale_neurons)


def scale_neurons(directions: Tensor, stack: Stack, group: dict[str, Any]) -> tuple[Tensor, float]:
    """Even out the neurons of ``directions`` (matrices, rows, columns) and bring each matrix back to Muon's size.

    Returns:
        The scaled directions, in the weight's dtype, and the factor on the learning rate.
    """
    assert stack.second_moment is not None
    eps, sides = group["eps"], (-2, -1)
    directions = directions.to(stack.weight.dtype)
    mean_square = directions.square().mean(dim=-1, keepdim=True)
    stack.second_moment.lerp_(mean_square, 1 - group["beta2"])
    scaled = directions / stack.second_moment.sqrt().add_(eps)
    norm = torch.linalg.vector_norm(scaled, dim=sides, keepdim=True).clamp_(min=eps)  # of no gradient at all: 0
    if group["adjust_lr"] == "original":
        before = torch.linalg.vector_norm(directions, dim=sides, keepdim=True)
        return scaled.mul_(before / norm), lr_scale("original", stack.fan_out, stack.fan_in)
    return scaled.mul_(RMS * math.sqrt(stack.fan_out * stack.fan_in) / norm), 1.0
