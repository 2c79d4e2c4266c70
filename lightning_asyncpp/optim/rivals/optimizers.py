"""Adan, Lion and MARS, in the forms of their authors' code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lightning_asyncpp.optim.checks import RULES, decay_rates
from lightning_asyncpp.optim.composite import MatrixAdamW
from lightning_asyncpp.optim.per_parameter import PerParameter, adam_direction, count, new_average, update_parameters


class Adan(PerParameter):
    """Adam with a second momentum, of the differences of successive gradients.

    Source: "Adan: Adaptive Nesterov Momentum Algorithm for Faster Optimizing Deep Models", Xie et al. 2022,
    arXiv 2208.06677, Algorithm 1, in the form of the authors' code. With D = G - (the gradient before), 0 at first::

        M = beta1 * M + (1 - beta1) * G
        V = beta2 * V + (1 - beta2) * D
        N = beta3 * N + (1 - beta3) * (G + beta2 * D)^2
        W = (W - lr * (M' + beta2 * V') / (sqrt(N') + eps)) / (1 + lr * weight_decay)

    M', V', N' are the averages with Adam's bias correction, as the authors' code has it; their listing starts the
    averages at the first gradient instead. Betas are decay rates here and in the code, one minus those of the paper.
    The weight decay is the paper's proximal step, decoupled as AdamW's and equal to it to first order in lr.

    There is no ``max_grad_norm``. The authors' code clips by a norm over all parameters that the optimizer has, and a
    pipeline stage has a part of the model: every stage would clip by a norm of its own, and the trajectory would
    depend on where the model is cut. Let the trainer clip (``gradient_clip_val``): it does so by the norm over all
    stages.

    One parameter group, so any pipeline stage shows the same; names are not needed, but kept. Memory: four buffers per
    parameter, in its dtype.

    Args:
        params: ``module.named_parameters()``, ``module.parameters()`` or torch parameter groups.
        lr: step size.
        betas: decay of the averages of the gradient, of its difference and of the square; in [0, 1).
        eps: added to the denominator.
        weight_decay: decay per step in units of the learning rate.

    Raises:
        ValueError: names all problems of the configuration at once.
    """

    rules = {**RULES, "betas": decay_rates(3)}

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float, float] = (0.98, 0.92, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Update one parameter in place."""
        if not state:
            state.update({key: new_average(p) for key in ("exp_avg", "exp_avg_diff", "exp_avg_sq")})
            state["previous_grad"] = grad.clone()
        step = count(state)
        mean, mean_diff, mean_square = state["exp_avg"], state["exp_avg_diff"], state["exp_avg_sq"]
        beta1, beta2, beta3 = group["betas"]
        diff = grad - state["previous_grad"]
        state["previous_grad"].copy_(grad)
        mean.lerp_(grad, 1 - beta1)
        mean_diff.lerp_(diff, 1 - beta2)
        ahead = diff.mul_(beta2).add_(grad)
        mean_square.mul_(beta3).addcmul_(ahead, ahead, value=1 - beta3)
        denominator = mean_square.sqrt().div_((1 - beta3**step) ** 0.5).add_(group["eps"])
        direction = (mean / (1 - beta1**step)).add_(mean_diff, alpha=beta2 / (1 - beta2**step))
        p.addcdiv_(direction, denominator, value=-group["lr"])
        p.div_(1 + group["lr"] * group["weight_decay"])


class Lion(PerParameter):
    """Steps of one size for every weight: the sign of a momentum that is still to take in the current gradient.

    Source: "Symbolic Discovery of Optimization Algorithms", Chen et al. 2023, arXiv 2302.06675, Algorithm 2::

        W = W - lr * (sign(beta1 * M + (1 - beta1) * G) + weight_decay * W)
        M = beta2 * M + (1 - beta2) * G                       M starts at 0; there is no bias correction

    The paper advises a learning rate 3 to 10 times below AdamW's and a weight decay as much above it. Its betas are
    (0.9, 0.99) in general and (0.95, 0.98), the default here, for language models.

    One parameter group, so any pipeline stage shows the same; names are not needed, but kept. Memory: one buffer per
    parameter, in its dtype.

    Args:
        params: ``module.named_parameters()``, ``module.parameters()`` or torch parameter groups.
        lr: step size of every weight.
        betas: the share of the momentum in the step, and the decay of the momentum; in [0, 1).
        weight_decay: decoupled decay per step in units of the learning rate.

    Raises:
        ValueError: names all problems of the configuration at once.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.95, 0.98),
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Update one parameter in place."""
        if not state:
            state["exp_avg"] = new_average(p)
        beta1, beta2 = group["betas"]
        direction = state["exp_avg"].lerp(grad, 1 - beta1).sign_()
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(direction, alpha=-group["lr"])
        state["exp_avg"].lerp_(grad, 1 - beta2)


class MARS(MatrixAdamW):
    """MARS-AdamW, the approximate version, which evaluates one gradient per update.

    Source: "MARS: Unleashing the Power of Variance Reduction for Training Large Models", Yuan et al. 2024,
    arXiv 2411.10438. With G' the gradient of the update before (of other data, hence "approximate")::

        C = G + gamma * beta1 / (1 - beta1) * (G - G')        at the first update C = G
        C = C / max(1, |C|)
        M = beta1 * M + (1 - beta1) * C
        V = beta2 * V + (1 - beta2) * C^2
        W = W - lr * (M / (1 - beta1^t) / (sqrt(V / (1 - beta2^t)) + eps) + weight_decay * W)

    The norm is that of one parameter, as in the authors' code: it depends on no other parameter, and so not on where a
    pipeline cuts the model. At the first update the paper has no earlier point (x_0 = x_1), thus C = G; the authors'
    code takes G' = 0 there, which makes the first C larger by a constant factor before it is clipped.

    As in the authors' code matrices of any role, embeddings and heads too, go to MARS and everything else to
    ``torch.optim.AdamW``; the shape decides (:func:`lightning_asyncpp.optim.split.is_matrix`), so names are not
    needed. ``adamw_names`` sends more to AdamW. ``param_groups`` are always two, ``mars`` and ``adamw``, also where
    one is empty. Parameters whose gradient is None are left alone.

    Memory: three buffers per MARS parameter and two per AdamW parameter, in the parameter's dtype.

    Args:
        params: ``module.named_parameters()``, ``module.parameters()``, or groups ``{"params": ..., "algorithm": "mars"
            | "adamw"}``.
        lr: step size of MARS.
        adamw_lr: step size of AdamW; None: ``lr``.
        betas: decay of the averages of C and of its square, in [0, 1).
        gamma: strength of the correction by the earlier gradient, at least 0; at 0 what remains is AdamW on clipped
            gradients.
        eps: added to the denominator.
        weight_decay: decoupled decay per step in units of the learning rate, for both algorithms.
        adamw_weight_decay: the same for AdamW alone; None: ``weight_decay``.
        adamw_betas: decay of AdamW's averages of the gradient and of its square.
        adamw_eps: added to AdamW's denominator.
        adamw_names: regular expression searched in parameter names; matching matrices go to AdamW. None: none does.

    Raises:
        ValueError: names all problems of the configuration at once.
    """

    matrix_algorithm = "mars"

    def __init__(
        self,
        params: ParamsT,
        lr: float = 3e-3,
        adamw_lr: float | None = None,
        betas: tuple[float, float] = (0.95, 0.99),
        gamma: float = 0.025,
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        adamw_weight_decay: float | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_names: str | None = None,
    ) -> None:
        mars = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "gamma": gamma, "eps": eps}
        adamw = {"lr": adamw_lr, "weight_decay": adamw_weight_decay, "betas": adamw_betas, "eps": adamw_eps}
        super().__init__(params, adamw_names, mars, adamw)

    def step_matrices(self, group: dict[str, Any]) -> None:
        """Take MARS's step."""
        update_parameters(group, self.state, _update_mars)


def _update_mars(p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    if not state:
        state.update({key: new_average(p) for key in ("exp_avg", "exp_avg_sq")})
        state["previous_grad"] = grad.clone()
    step = count(state)
    beta1, beta2 = group["betas"]
    corrected = (grad - state["previous_grad"]).mul_(group["gamma"] * beta1 / (1 - beta1)).add_(grad)
    state["previous_grad"].copy_(grad)
    wide = torch.promote_types(grad.dtype, torch.float32)
    corrected.div_(torch.linalg.vector_norm(corrected, dtype=wide).clamp_(min=1))
    state["exp_avg"].lerp_(corrected, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(corrected, corrected, value=1 - beta2)
    direction = adam_direction(state["exp_avg"], state["exp_avg_sq"], step, group["betas"], group["eps"])
    p.mul_(1 - group["lr"] * group["weight_decay"])
    p.add_(direction, alpha=-group["lr"])
