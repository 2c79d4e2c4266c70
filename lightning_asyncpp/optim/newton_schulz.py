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
    form: str = "direct",
) -> Tensor:
    """Map each U S V^T to about U V^T.

    Args:
        matrices: stacks of shape (n_i, rows, columns), all of the same rows and columns; left as they are.
        steps: number of iterations.
        coefficients: a, b, c of X <- a X + (b G + c G G) X with G = X X^T.
        dtype: the iteration's; bfloat16 is what Muon was published with.
        form: "direct": as written above; "gram": matrices with one side at least 1.5 times the other are multiplied
            once per few steps, and the steps are taken on G (arXiv 2505.16932, appendix F).

    Returns:
        One stack of shape (sum of n_i, rows, columns) in ``dtype``.
    """
    x = _normalized(matrices, dtype)
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x  # G is then the smaller of the two Gram matrices
    gram, product = (x.new_empty(*x.shape[:-1], x.size(-2)) for _ in range(2))
    symmetric_product(x, x.mT, gram)
    wide = x.size(-1) >= GRAM_ASPECT * x.size(-2)
    iterate = _gram_form if form == "gram" and wide else _direct_form
    x = iterate(x, gram, product, steps, coefficients)
    return x.mT if tall else x


def _direct_form(x: Tensor, gram: Tensor, product: Tensor, steps: int, coefficients: Quintic) -> Tensor:
    a, b, c = coefficients
    spare = _like(x)
    for step in range(steps):
        if step:
            symmetric_product(x, x.mT, gram)
        symmetric_product(gram, gram, product, gram, beta=b, alpha=c)
        full_product(product, x, spare, x, beta=a)
        x, spare = spare, _spare(x)
    return x


def _gram_form(x: Tensor, gram: Tensor, product: Tensor, steps: int, coefficients: Quintic) -> Tensor:
    a, b, c = coefficients
    segment = steps if x.element_size() > 2 else GRAM_STEPS
    spare = _like(x)
    for start in range(0, steps, segment):
        if start:
            symmetric_product(x, x.mT, gram)
        todo = min(segment, steps - start)
        if todo == 1:
            symmetric_product(gram, gram, product, gram, beta=b, alpha=c)
            full_product(product, x, spare, x, beta=a)
        else:
            torch.bmm(_product_of_steps(gram, product, todo, coefficients), x, out=spare)
        x, spare = spare, _spare(x)
    return x


def _product_of_steps(gram: Tensor, p: Tensor, steps: int, coefficients: Quintic) -> Tensor:
    """Return Q with X_n = Q X_0: Q <- P Q and G <- P G P, where P = a + b G + c G G; ``gram`` and ``p`` are used up."""
    a, b, c = coefficients
    q, free = torch.empty_like(p), torch.empty_like(p)
    for step in range(steps):
        symmetric_product(gram, gram, p, gram, beta=b, alpha=c)
        p.diagonal(dim1=-2, dim2=-1).add_(a)
        if step == 0:
            q.copy_(p)
        else:
            symmetric_product(p, q, free)
            q, free = free, q
        if step + 1 < steps:
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
