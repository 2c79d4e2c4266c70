"""Lion: the sign of an interpolated momentum."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from lightning_asyncpp.optim.per_parameter import PerParameter, new_average


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
