"""Newton-Schulz orthogonalisation of a stack of matrices, Muon's costly part.

The quintic iteration and its coefficients are those of Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/)
and of ``torch.optim.Muon``; here all matrices of one shape go through one batched product.
"""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Maximise the slope at zero: singular values land in about [0.7, 1.2] after 5 steps, not exactly on 1."""

NORM_EPS = 1e-7
"""Smallest Frobenius norm that a matrix is divided by; a zero matrix stays zero."""


@torch.no_grad()
def orthogonalize(
    matrices: list[Tensor],
    *,
    steps: int = 5,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Map each U S V^T to about U V^T.

    Args:
        matrices: stacks of shape (n_i, rows, columns), all of the same rows and columns; left as they are.
        steps: number of iterations.
        coefficients: a, b, c of X <- a X + (b G + c G G) X with G = X X^T.
        dtype: the iteration's; bfloat16 is what Muon was published with.

    Returns:
        One stack of shape (sum of n_i, rows, columns) in ``dtype``.
    """
    a, b, c = coefficients
    x = torch.cat([_normalized(stack, dtype) for stack in matrices])
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x  # G is then the smaller of the two Gram matrices
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x


def _normalized(stack: Tensor, dtype: torch.dtype) -> Tensor:
    # The norm is taken per stack, before stacks are joined: a reduction over a larger batch may sum in another order,
    # and a matrix's result must not depend on its neighbours. The spectral norm is at most the Frobenius norm.
    x = stack.to(dtype)
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    return x.div(norm.clamp(min=NORM_EPS))
