"""One optimizer for a whole model: Muon for hidden matrices, AdamW for everything else."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.optim.optimizer import ParamsT

from lightning_asyncpp.optim.composite import MatrixAdamW
from lightning_asyncpp.optim.muon import ADDED_LATER, REMOVED, muon_step
from lightning_asyncpp.optim.newton_schulz import COEFFICIENTS
from lightning_asyncpp.optim.split import DEFAULT_ADAMW_NAMES


class MuonAdamW(MatrixAdamW):
    """Muon for hidden weight matrices and AdamW for embeddings, the output head, norms, biases and vectors.

    Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; ``torch.optim.Muon``): the momentum of each
    matrix is orthogonalised by a few Newton-Schulz iterations, so that a step moves all directions alike. Which
    parameter goes where is the rule in :func:`lightning_asyncpp.optim.split.algorithm_for`.

    ``param_groups`` are always two, ``muon`` and ``adamw`` in this order, also where one is empty, so every pipeline
    stage shows schedulers and learning-rate monitors the same groups. All hyper-parameters are read from the groups at
    each step. A matrix is updated as ``torch.optim.Muon`` does it; a 3-D weight (experts, out, in) as its experts'
    ``nn.Linear`` weights (out, in) one by one; the rest exactly as ``torch.optim.AdamW``. Parameters whose gradient is
    None are left alone.

    Memory: one buffer per Muon parameter and two per AdamW parameter, in the parameter's dtype, and temporaries for
    about 2**25 elements at a time. On CPUs without bfloat16 units choose ``newton_schulz_dtype="float32"``: bfloat16
    products are some 30 times slower there.

    Args:
        params: ``module.named_parameters()``, or groups ``{"params": ..., "algorithm": "muon" | "adamw"}`` of tensors
            with or without names. Unnamed tensors alone do only if none of them is a matrix.
        lr: step size of Muon; with ``match_rms_adamw`` it is on AdamW's scale.
        adamw_lr: step size of AdamW; None: ``lr``.
        momentum: decay of Muon's gradient average, in [0, 1).
        nesterov: look one momentum step ahead.
        weight_decay: decoupled decay per step in units of the learning rate, for both algorithms.
        adamw_weight_decay: the same for AdamW alone; None: ``weight_decay``.
        adamw_betas: decay of AdamW's averages of the gradient and of its square.
        adamw_eps: added to AdamW's denominator.
        newton_schulz_steps: iterations per matrix.
        coefficients: of the quintic iteration.
        adjust_lr: "match_rms_adamw": lr * 0.2 * sqrt(max(fan_out, fan_in)); "original": lr * sqrt(max(1, fan_out /
            fan_in)). The meanings of ``adjust_lr_fn`` in ``torch.optim.Muon``.
        newton_schulz_dtype: "bfloat16" (as torch), "float32" or "float64", or the torch dtype.
        adamw_names: regular expression searched in parameter names; matching parameters go to AdamW.
        batched: join equal shapes into one product. None: on GPUs, unless deterministic algorithms are asked for
            (``torch.use_deterministic_algorithms``), where a matrix's bits could depend on its neighbours.
        newton_schulz_form: "direct", as torch; "gram" (arXiv 2505.16932, appendix F): fewer operations for matrices
            that are not square, other rounding. See :func:`lightning_asyncpp.optim.newton_schulz.orthogonalize`.

    Raises:
        ValueError: names all problems of the configuration at once.
    """

    matrix_algorithm = "muon"
    added_later = ADDED_LATER
    removed = REMOVED

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        adamw_lr: float | None = None,
        momentum: float = 0.95,
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
        muon = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "newton_schulz_steps": newton_schulz_steps,
            "coefficients": coefficients,
            "adjust_lr": adjust_lr,
            "newton_schulz_dtype": newton_schulz_dtype,
            "batched": batched,
            "newton_schulz_form": newton_schulz_form,
        }
        adamw = {"lr": adamw_lr, "weight_decay": adamw_weight_decay, "betas": adamw_betas, "eps": adamw_eps}
        super().__init__(params, adamw_names, muon, adamw)

    def step_matrices(self, group: dict[str, Any]) -> None:
        """Take Muon's step."""
        muon_step(group, self.state)
