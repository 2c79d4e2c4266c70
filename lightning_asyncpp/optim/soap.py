"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from lightning_asyncpp.optim.muon import is_matrix


class SOAP(Optimizer):
    """Adam, for each matrix, in a basis in which the entries of the matrix's gradient are nearly uncorrelated.

    Source: "SOAP: Improving and Stabilizing Shampoo using Adam", Vyas et al. 2024, arXiv 2409.11321, Algorithm 3. For a
    matrix W (rows, columns) with gradient G and the bases Q_L (rows, rows), Q_R (columns, columns)::

        M = beta1 * M + (1 - beta1) * G
        V = beta2 * V + (1 - beta2) * (Q_L^T G Q_R)^2
        W = W - lr * (Q_L Adam(Q_L^T M Q_R, V) Q_R^T + weight_decay * W)      Adam: bias corrected, with eps
        L = shampoo_beta * L + (1 - shampoo_beta) * G G^T                     and R with G^T G
        every precondition_frequency updates: Q_L = QR(L Q_L), Q_R = QR(R Q_R)

    As in the authors' code, the first gradient of a matrix only sets the bases (eigenvectors of G G^T and G^T G) and
    moves no weights, so that no gradient is rotated into a basis made of itself. Before QR the columns of L Q_L are
    sorted by their eigenvalue estimates, and V with them. As in the paper, a side longer than
    ``max_precondition_dim``, such as a large vocabulary, is not rotated: its Q is the identity. Vectors and other
    parameters without a side to rotate are updated exactly as by AdamW, from the first gradient on. A 3-D weight
    (experts, out, in) is a stack of matrices, each with its own bases.

    The shape alone decides how a parameter is updated, so names are not needed. The update of a parameter depends on no
    other parameter, and begins at its first gradient. Bases are computed in fp32 (fp64 for fp64 weights) and kept in
    the parameter's dtype.

    Memory: two buffers per parameter, and two n x n matrices per rotated side of length n. Compute per update and
    rotated side: three products with an n x n basis, and the product of G and G^T or of G^T and G. Every
    ``precondition_frequency``-th update adds, per rotated side, a product of n x n matrices and a QR decomposition.

    Args:
        params: ``module.named_parameters()``, ``module.parameters()`` or torch parameter groups.
        lr: step size, on AdamW's scale.
        betas: decay rates of Adam's averages of the gradient and of the rotated gradient's square, in [0, 1).
        shampoo_beta: decay rate of L and R; None for the second of ``betas``.
        eps: constant added to Adam's denominator.
        weight_decay: decoupled decay per step in units of the learning rate.
        precondition_frequency: number of updates between two refreshes of the bases.
        max_precondition_dim: longest side of a matrix that is rotated.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        shampoo_beta: float | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        precondition_frequency: int = 10,
        max_precondition_dim: int = 10000,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "shampoo_beta": shampoo_beta,
            "eps": eps,
            "weight_decay": weight_decay,
            "precondition_frequency": precondition_frequency,
            "max_precondition_dim": max_precondition_dim,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient; return the result of ``closure``, if there is one."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    _update(p, p.grad, self.state[p], group)
        return loss


def _update(p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    if not state:
        state["step"] = 0
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = torch.zeros_like(p, memory_format=torch.preserve_format)
        if _make_bases(grad, state, group):
            return
    step = state["step"] = int(state["step"]) + 1  # older versions saved a tensor
    beta1, beta2 = group["betas"]
    mean, mean_square = state["exp_avg"], state["exp_avg_sq"]
    rotated = _rotate(grad, state)
    mean.lerp_(grad, 1 - beta1)
    mean_square.mul_(beta2).addcmul_(rotated, rotated, value=1 - beta2)
    denominator = mean_square.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
    direction = (_rotate(mean, state) / (1 - beta1**step)).div_(denominator)
    p.mul_(1 - group["lr"] * group["weight_decay"])
    p.add_(_rotate_back(direction, state), alpha=-group["lr"])
    # Update L and R last, since this gradient must not be rotated into a basis made of it.
    _average_products(grad, state, group)
    if step % group["precondition_frequency"] == 0:
        _refresh_bases(state)


def _make_bases(grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> bool:
    """Initialise the bases of the rotated sides; return whether there are any."""
    if not is_matrix(grad.shape):
        return False
    sides = {"left": grad.size(-2), "right": grad.size(-1)}
    rotated = [side for side, size in sides.items() if size <= group["max_precondition_dim"]]
    for side in rotated:
        state[f"product_{side}"] = grad.new_zeros(*grad.shape[:-2], sides[side], sides[side])
    _average_products(grad, state, group)
    for side in rotated:
        product = state[f"product_{side}"]
        vectors = torch.linalg.eigh(_wide(product)).eigenvectors.flip(-1)  # the largest eigenvalue first
        # Make bases contiguous, since the rounding of products may depend on strides, which a checkpoint may not keep.
        state[f"basis_{side}"] = vectors.to(product.dtype).contiguous()
    return bool(rotated)


def _average_products(grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    decay = group["betas"][1] if group["shampoo_beta"] is None else group["shampoo_beta"]
    if "product_left" in state:
        state["product_left"].lerp_(grad @ grad.mT, 1 - decay)
    if "product_right" in state:
        state["product_right"].lerp_(grad.mT @ grad, 1 - decay)


def _refresh_bases(state: dict[str, Any]) -> None:
    """Take one step of orthogonal iteration towards the eigenvectors; reorder ``exp_avg_sq`` like the basis."""
    for side, axis in (("left", -2), ("right", -1)):
        if f"basis_{side}" not in state:
            continue
        basis, squares = state[f"basis_{side}"], state["exp_avg_sq"]
        product = _wide(state[f"product_{side}"]) @ _wide(basis)
        order = (_wide(basis) * product).sum(dim=-2).argsort(dim=-1, descending=True, stable=True)
        squares.copy_(squares.take_along_dim(order.unsqueeze(-1 if axis == -2 else -2), dim=axis))
        basis.copy_(torch.linalg.qr(product.take_along_dim(order.unsqueeze(-2), dim=-1)).Q)


def _rotate(x: Tensor, state: dict[str, Any]) -> Tensor:
    x = state["basis_left"].mT @ x if "basis_left" in state else x
    return x @ state["basis_right"] if "basis_right" in state else x


def _rotate_back(x: Tensor, state: dict[str, Any]) -> Tensor:
    x = state["basis_left"] @ x if "basis_left" in state else x
    return x @ state["basis_right"].mT if "basis_right" in state else x


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
