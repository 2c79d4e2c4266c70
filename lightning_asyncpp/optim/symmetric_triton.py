"""Symmetric product as a Triton kernel that computes the blocks on and below the diagonal and mirrors them.

This saves up to half of the arithmetic of a full product. The reference is
:func:`~lightning_asyncpp.optim.newton_schulz.full_product`. Block sizes are fixed, so that the bits of a matrix's
result depend neither on the matrices in its batch nor on a search for the fastest sizes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128
"""Rows and columns of a block of the result, whose accumulator of 64 KiB fits the registers of 8 warps."""

BLOCK_INNER = 64
"""Depth of a product of blocks. In 16 bits, 2 blocks (of A and B) x 16 KiB x 3 stages = 96 KiB of shared memory, which
all GPUs from Ampere on have."""

STAGES = 3
"""Number of pairs of blocks (of A and B) in shared memory: while one pair is multiplied, the next pairs are loaded."""

WARPS = 8
"""Number of warps of 32 threads; with 4 the accumulator would not fit their registers."""


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    a, b, addend, out, size, inner,
    a_matrix, a_row, a_column, b_matrix, b_row, b_column,
    addend_matrix, addend_row, addend_column, out_matrix, out_row, out_column,
    alpha, beta,
    has_addend: tl.constexpr, block: tl.constexpr, block_inner: tl.constexpr,
):  # fmt: skip
    block_row, block_column = tl.program_id(0), tl.program_id(1)
    matrix = tl.program_id(2).to(tl.int64)
    if block_column > block_row:  # the mirror image of a block that another program computes
        return
    rows = block_row * block + tl.arange(0, block)
    columns = block_column * block + tl.arange(0, block)
    depth = tl.arange(0, block_inner)
    row_mask, column_mask = rows < size, columns < size
    # Compute in 64 bits: a row's number times its stride may not fit 32.
    a_pointers = a + matrix * a_matrix + rows.to(tl.int64)[:, None] * a_row + depth[None, :] * a_column
    b_pointers = b + matrix * b_matrix + depth[:, None] * b_row + columns.to(tl.int64)[None, :] * b_column
    total = tl.zeros((block, block), dtype=tl.float32)
    for start in range(0, inner, block_inner):
        depth_mask = start + depth < inner
        a_block = tl.load(a_pointers, mask=row_mask[:, None] & depth_mask[None, :], other=0.0)
        b_block = tl.load(b_pointers, mask=depth_mask[:, None] & column_mask[None, :], other=0.0)
        total = tl.dot(a_block, b_block, total)
        a_pointers += block_inner * a_column
        b_pointers += block_inner * b_row
    total = total * alpha
    mask = row_mask[:, None] & column_mask[None, :]
    rows, columns = rows.to(tl.int64), columns.to(tl.int64)
    if has_addend:
        places = addend + matrix * addend_matrix + rows[:, None] * addend_row + columns[None, :] * addend_column
        total += beta * tl.load(places, mask=mask, other=0.0).to(tl.float32)
    result = total.to(out.dtype.element_ty)
    out += matrix * out_matrix
    tl.store(out + rows[:, None] * out_row + columns[None, :] * out_column, result, mask=mask)
    if block_column < block_row:
        mirrored = out + columns[:, None] * out_row + rows[None, :] * out_column
        tl.store(mirrored, tl.trans(result), mask=column_mask[:, None] & row_mask[None, :])


def triton_symmetric_product(
    a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None, beta: float, alpha: float
) -> Tensor:
    """Write ``alpha * a @ b + beta * addend`` into ``out``; the blocks above the diagonal mirror those below.

    Args:
        a: (matrices, n, k), any strides.
        b: (matrices, k, n) of the same dtype, any strides.
        out: (matrices, n, n), sharing no memory with the other arguments; returned.
        addend: (matrices, n, n), symmetric; None to add nothing.
        beta: factor on ``addend``.
        alpha: factor on the product, which is accumulated in float32 and must be symmetric.
    """
    matrices, size, inner = a.shape
    added = out if addend is None else addend  # a pointer is needed in any case
    blocks = triton.cdiv(size, BLOCK)
    with torch.cuda.device_of(a):  # Triton launches on the current device, not on the tensors'
        _kernel[(blocks, blocks, matrices)](
            a, b, added, out, size, inner, *a.stride(), *b.stride(), *added.stride(), *out.stride(), alpha, beta,
            has_addend=addend is not None, block=BLOCK, block_inner=BLOCK_INNER, num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
    return out
