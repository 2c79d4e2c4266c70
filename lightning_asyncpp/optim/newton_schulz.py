"""Newton-Schulz orthogonalisation of a stack of matrices, Muon's costly part.

The quintic iteration and its coefficients are those of Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/)
and of ``torch.optim.Muon``, and so are the results; here all matrices of one shape go through one batched product, and
products that are symmetric are computed by half.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_asyncpp.optim.symmetric import full_product, symmetric_product

Quintic = tuple[float, float, float]
"""a, b, c of x -> a x + b x^3 + c x^5, which a step applies to the singular values."""

COEFFICIENTS: Quintic = (3.4445, -4.7750, 2.0315)
"""Maximise the slope at zero: singular values land in about [0.7, 1.2] after 5 steps, not exactly on 1."""

NORM_EPS = 1e-7
"""Smallest Frobenius norm that a matrix is divided by; a zero matrix stays zero."""


@torch.no_grad()
def orthogonalize(
    matrices: list[Tensor],
    *,
    steps: int = 5,
    coefficients: Quintic = COEFFICIENTS,
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
    x = _normalized(matrices, dtype)
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x  # G is then the smaller of the two Gram matrices
    gram, product = (x.new_empty(*x.shape[:-1], x.size(-2)) for _ in range(2))
    spare = _like(x)
    for _ in range(steps):
        symmetric_product(x, x.mT, gram)
        symmetric_product(gram, gram, product, gram, beta=b, alpha=c)
        full_product(product, x, spare, x, beta=a)
        # Memory for the next step. Not that of a transposed matrix: products into it are rounded otherwise.
        x, spare = spare, x if x.is_contiguous() else _like(x)
    return x.mT if tall else x


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _normalized(matrices: list[Tensor], dtype: torch.dtype) -> Tensor:
    # The norm is taken per stack, before stacks are joined: a reduction over a larger batch may sum in another order,
    # and a matrix's result must not depend on its neighbours. The spectral norm is at most the Frobenius norm.
    x = matrices[0].new_empty(sum(stack.size(0) for stack in matrices), *matrices[0].shape[1:], dtype=dtype)
    for part, stack in zip(x.split([stack.size(0) for stack in matrices]), matrices):
        part.copy_(stack)
        part.div_(torch.linalg.vector_norm(part, dim=(-2, -1), keepdim=True).clamp_(min=NORM_EPS))
    return x
