"""Newton-Schulz orthogonalisation of a stack of matrices, the expensive part of Muon.

The quintic iteration, its coefficients and its results are those of Jordan et al. 2024
(https://kellerjordan.github.io/posts/muon/) and of ``torch.optim.Muon``. Here all matrices of one shape go through one
batched product, and on CPUs only about half of a large symmetric product is computed. All products of a step except the
last are symmetric: X X^T, and the products of polynomials in X X^T, since these commute. torch has no operator for
symmetric products, so strips of rows are computed one by one, each up to the diagonal.
"""

from __future__ import annotations

import torch
from torch import Tensor

Quintic = tuple[float, float, float]
"""Coefficients a, b, c of x -> a x + b x^3 + c x^5, which a step applies to the singular values."""

COEFFICIENTS: Quintic = (3.4445, -4.7750, 2.0315)
"""Coefficients that maximise the slope at zero: 5 steps map singular values to about [0.7, 1.2], not exactly 1."""

NORM_EPS = 1e-7
"""Smallest Frobenius norm by which a matrix is divided; a zero matrix stays zero."""

STRIP_ROWS = {torch.float32: 192, torch.float64: 192}
"""Rows of a strip on a CPU, by dtype: smaller strips skip more products above the diagonal, but are slower, and threads
wait for each other after each strip."""

STRIP_ROWS_OTHERWISE = 256


@torch.no_grad()
def orthogonalize(
    matrices: list[Tensor],
    *,
    steps: int = 5,
    coefficients: Quintic = COEFFICIENTS,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Map each matrix U S V^T to about U V^T.

    Args:
        matrices: stacks of shape (n_i, rows, columns), all with the same rows and columns; not changed.
        steps: number of iterations.
        coefficients: a, b, c of X <- a X + (b G + c G G) X with G = X X^T.
        dtype: dtype of the iteration; Muon was published with bfloat16.

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
        # The next step writes into x's memory, unless x is a transposed view: products into views round differently.
        x, spare = spare, x if x.is_contiguous() else _like(x)
    return x.mT if tall else x


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _normalized(matrices: list[Tensor], dtype: torch.dtype) -> Tensor:
    # Norms are computed before stacks are joined: a reduction over a larger batch may sum in another order, and a
    # matrix's result must not depend on the other matrices. The iteration needs singular values of at most 1, so
    # division by the Frobenius norm suffices: it is at least the spectral norm.
    x = matrices[0].new_empty(sum(stack.size(0) for stack in matrices), *matrices[0].shape[1:], dtype=dtype)
    for part, stack in zip(x.split([stack.size(0) for stack in matrices]), matrices):
        part.copy_(stack)
        part.div_(torch.linalg.vector_norm(part, dim=(-2, -1), keepdim=True).clamp_(min=NORM_EPS))
    return x


def symmetric_product(
    a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0
) -> Tensor:
    """Write ``alpha * a @ b + beta * addend``, which must be symmetric, into ``out``.

    Args:
        a: (matrices, n, k).
        b: (matrices, k, n), of the same dtype.
        out: (matrices, n, n), sharing no memory with the other arguments; returned.
        addend: (matrices, n, n), symmetric; None to add nothing.
        beta: factor on ``addend``.
        alpha: factor on the product; must be 1 without ``addend``.
    """
    strip = STRIP_ROWS.get(a.dtype, STRIP_ROWS_OTHERWISE)
    if a.device.type == "cpu" and a.size(-2) >= 2 * strip:
        return _by_strips(a, b, out, addend, beta, alpha, strip)
    return full_product(a, b, out, addend, beta, alpha)


def full_product(
    a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0
) -> Tensor:
    """Compute :func:`symmetric_product` by torch's product, as a reference and for products that are not symmetric.

    ``addend`` has the shape of ``out``.
    """
    if addend is None:
        return torch.bmm(a, b, out=out)
    return torch.baddbmm(addend, a, b, beta=beta, alpha=alpha, out=out)


def _by_strips(
    a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None, beta: float, alpha: float, rows: int
) -> Tensor:
    # Multiply one matrix at a time: a batched product would copy the strips, and would be slower than the full product.
    for i in range(a.size(0)):
        for start in range(0, a.size(1), rows):
            end = min(start + rows, a.size(1))
            strip, left, right = out[i, start:end, :end], a[i, start:end], b[i, :, :end]
            if addend is None:
                torch.mm(left, right, out=strip)
            else:
                torch.addmm(addend[i, start:end, :end], left, right, beta=beta, alpha=alpha, out=strip)
            out[i, :start, start:end].copy_(strip[:, :start].T)
    return out
