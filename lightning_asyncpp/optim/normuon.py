"""One optimizer for a whole model: NorMuon for hidden matrices, AdamW for everything else."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lightning_asyncpp.optim.muon import MuonAdamW, Stack, lr_scale
from lightning_asyncpp.optim.options import check_options

RMS = 0.2
"""Root mean square of the entries of an update with ``match_rms_adamw``, in units of the learning rate."""


class NorMuonAdamW(MuonAdamW):
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
    :class:`~lightning_asyncpp.optim.MuonAdamW`. The paper's listing has no Nesterov momentum, the authors' code does.
    With ``adjust_lr="original"`` the update keeps the norm of O and is scaled by sqrt(max(1, fan_out / fan_in)), as in
    the authors' code.

    Memory: that of MuonAdamW and one number per neuron.

    Args:
        params: ``module.named_parameters()``, ``module.parameters()`` or torch parameter groups.
        lr: step size of NorMuon; with ``match_rms_adamw`` it is on AdamW's scale.
        beta2: decay of the average of each neuron's squares, in [0, 1).
        eps: added to the root of that average.
        **options: those of MuonAdamW.

    Raises:
        ValueError: an option cannot be used.
    """

    keeps_second_moment = True

    def __init__(
        self, params: ParamsT, lr: float = 1e-3, beta2: float = 0.95, eps: float = 1e-10, **options: Any
    ) -> None:
        super().__init__(params, lr=lr, **options)
        self.defaults.update(beta2=beta2, eps=eps)
        for group in self.param_groups:
            group.setdefault("beta2", beta2)
            group.setdefault("eps", eps)
            check_options(self, group)

    def _scale(self, directions: Tensor, stack: Stack, group: dict[str, Any]) -> tuple[Tensor, float]:
        """Even out the neurons of ``directions`` and bring each matrix back to Muon's size."""
        assert stack.second_moment is not None
        eps, sides = group["eps"], (-2, -1)
        fan_out, fan_in = directions.shape[-2:]
        directions = directions.to(stack.weight.dtype)
        mean_square = directions.square().mean(dim=-1, keepdim=True)
        stack.second_moment.lerp_(mean_square, 1 - group["beta2"])
        scaled = directions / stack.second_moment.sqrt().add_(eps)
        norm = torch.linalg.vector_norm(scaled, dim=sides, keepdim=True).clamp_(min=eps)  # of no gradient at all: 0
        if group["adjust_lr"] == "original":
            before = torch.linalg.vector_norm(directions, dim=sides, keepdim=True)
            return scaled.mul_(before / norm), lr_scale("original", fan_out, fan_in)
        return scaled.mul_(RMS * math.sqrt(fan_out * fan_in) / norm), 1.0
