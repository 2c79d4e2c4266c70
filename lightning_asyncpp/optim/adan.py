"""Adan: adaptive Nesterov momentum."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from lightning_asyncpp.optim.hyper import RULES, decay_rates
from lightning_asyncpp.optim.per_parameter import PerParameter, count, new_average


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
