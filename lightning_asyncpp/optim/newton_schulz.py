"""Newton-Schulz orthogonalisation of a stack of matrices, Muon's costly part.

The quintic iteration and its coefficients are those of Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/)
and of ``torch.optim.Muon``, and so are the results; here all matrices of one shape go through one batched product, and
products that are symmetric are computed by half. Other polynomials, scales and forms are options.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_asyncpp.optim.polynomials import COEFFICIENTS, Quintic, quintics
from lightning_asyncpp.optim.symmetric import full_product, symmetric_product

__all__ = ["COEFFICIENTS", "FORMS", "NORM_EPS", "SCALES", "orthogonalize"]

NORM_EPS = 1e-7
"""Smallest Frobenius norm that a matrix is divided by; a zero matrix stays zero."""

SCALES = ("frobenius", "schatten4", "aol")
FORMS = ("direct", "gram")

GRAM_ASPECT = 1.5
"""From this ratio of the sides on the Gram form takes fewer operations, with symmetric products."""

GRAM_STEPS = 2
"""Steps of the Gram form in 16 bits between returns to the matrix. There G keeps singular values only down to about
0.06, and what is rounded away comes back amplified: with 3 steps in a row some matrices of real trainings blew up."""


@torch.no_grad()
def orthogonalize(
    matrices: list[Tensor],
    *,
    steps: int = 5,
    coefficients: Quintic = COEFFICIENTS,
    dtype: torch.dtype = torch.bfloat16,
    polynomials: str = "quintic",
    scale: str = "frobenius",
    form: str = "direct",
) -> Tensor:
    """Map each U S V^T to about U V^T.

    Args:
        matrices: stacks of shape (n_i, rows, columns), all of the same rows and columns; left as they are.
        steps: number of iterations.
        coefficients: a, b, c of X <- a X + (b G + c G G) X with G = X X^T, for "quintic".
        dtype: the iteration's; bfloat16 is what Muon was published with.
        polynomials: "quintic": the same at each step; "polar_express": the best ones for each (arXiv 2505.16932).
        scale: what brings the singular values to at most 1 before the first step. "frobenius": the Frobenius norm;
            "schatten4": the norm sqrt(|G|_F), closer to the largest singular value; "aol": each row of the wide matrix
            by the root of its row of |G| (arXiv 2512.04632), which moves the singular vectors, too.
        form: "direct": as written above; "gram": matrices with one side at least 1.5 times the other are multiplied
            once per few steps, and the steps are taken on G (arXiv 2505.16932, appendix F).

    Returns:
        One stack of shape (sum of n_i, rows, columns) in ``dtype``.

    Raises:
        ValueError: there are no such polynomials.
    """
    x = _normalized(matrices, dtype)
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x  # G is then the smaller of the two Gram matrices
    gram, product = (x.new_empty(*x.shape[:-1], x.size(-2)) for _ in range(2))
    symmetric_product(x, x.mT, gram)
    _SCALE[scale](x, gram)
    todo = quintics(polynomials, steps, coefficients)
    wide = x.size(-1) >= GRAM_ASPECT * x.size(-2)
    x = _gram_form(x, gram, product, todo) if form == "gram" and wide else _direct_form(x, gram, product, todo)
    return x.mT if tall else x


def _direct_form(x: Tensor, gram: Tensor, product: Tensor, polynomials: Sequence[Quintic]) -> Tensor:
    spare = _like(x)
    for step, (a, b, c) in enumerate(polynomials):
        if step:
            symmetric_product(x, x.mT, gram)
        symmetric_product(gram, gram, product, gram, beta=b, alpha=c)
        full_product(product, x, spare, x, beta=a)
        x, spare = spare, _spare(x)
    return x


def _gram_form(x: Tensor, gram: Tensor, product: Tensor, polynomials: Sequence[Quintic]) -> Tensor:
    segment = len(polynomials) if x.element_size() > 2 else GRAM_STEPS
    spare = _like(x)
    for start in range(0, len(polynomials), segment):
        if start:
            symmetric_product(x, x.mT, gram)
        todo = polynomials[start : start + segment]
        if len(todo) == 1:
            ((a, b, c),) = todo
            symmetric_product(gram, gram, product, gram, beta=b, alpha=c)
            full_product(product, x, spare, x, beta=a)
        else:
            torch.bmm(_product_of_steps(gram, product, todo), x, out=spare)
        x, spare = spare, _spare(x)
    return x


def _product_of_steps(gram: Tensor, p: Tensor, polynomials: Sequence[Quintic]) -> Tensor:
    """Return Q with X_n = Q X_0: Q <- P Q and G <- P G P, where P = a + b G + c G G; ``gram`` and ``p`` are used up."""
    q, free = torch.empty_like(p), torch.empty_like(p)
    for step, (a, b, c) in enumerate(polynomials):
        symmetric_product(gram, gram, p, gram, beta=b, alpha=c)
        p.diagonal(dim1=-2, dim2=-1).add_(a)
        if step == 0:
            q.copy_(p)
        else:
            symmetric_product(p, q, free)
            q, free = free, q
        if step + 1 < len(polynomials):
            symmetric_product(p, gram, free)
            symmetric_product(free, p, gram)
    return q


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _spare(x: Tensor) -> Tensor:
    """Memory for the next step. Not that of a transposed matrix: products into it are rounded otherwise."""
    return x if x.is_contiguous() else _like(x)


def _normalized(matrices: list[Tensor], dtype: torch.dtype) -> Tensor:
    # The norm is taken per stack, before stacks are joined: a reduction over a larger batch may sum in another order,
    # and a matrix's result must not depend on its neighbours. The spectral norm is at most the Frobenius norm.
    x = matrices[0].new_empty(sum(stack.size(0) for stack in matrices), *matrices[0].shape[1:], dtype=dtype)
    for part, stack in zip(x.split([stack.size(0) for stack in matrices]), matrices):
        part.copy_(stack)
        part.div_(torch.linalg.vector_norm(part, dim=(-2, -1), keepdim=True).clamp_(min=NORM_EPS))
    return x


def _scale_frobenius(x: Tensor, gram: Tensor) -> None:
    """Leave the matrices as they are."""


def _scale_schatten4(x: Tensor, gram: Tensor) -> None:
    # What bfloat16 would round here would be an error of the whole spectrum. A zero matrix stays zero.
    dtype = torch.promote_types(gram.dtype, torch.float32)
    square = torch.linalg.vector_norm(gram, dim=(-2, -1), keepdim=True, dtype=dtype).clamp_(min=NORM_EPS)
    x.div_(square.sqrt())
    gram.div_(square)


def _scale_aol(x: Tensor, gram: Tensor) -> None:
    dtype = torch.promote_types(gram.dtype, torch.float32)
    rows = torch.linalg.vector_norm(gram, ord=1, dim=-1, keepdim=True, dtype=dtype)
    factors = rows.clamp_(min=NORM_EPS).rsqrt_()
    x.mul_(factors)
    gram.mul_(factors).mul_(factors.mT)


_SCALE = {"frobenius": _scale_frobenius, "schatten4": _scale_schatten4, "aol": _scale_aol}
