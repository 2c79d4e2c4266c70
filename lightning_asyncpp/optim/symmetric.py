"""Products of matrices that are known to be symmetric: half of the result is computed, the other half mirrored.

All products of a Newton-Schulz step but its last one are of this kind: X X^T, and products of polynomials of one
symmetric matrix, which commute. torch has no such product. On CPUs strips up to the diagonal are multiplied one by one,
on GPUs a Triton kernel leaves out the blocks above the diagonal.
"""

from __future__ import annotations

import warnings
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

STRIP_ROWS = {torch.float32: 192, torch.float64: 192}
"""Rows that a CPU multiplies at a time, by dtype: smaller strips skip more, but each is slower, and threads wait
for each other after each."""

STRIP_ROWS_OTHERWISE = 256

_without_kernel: set[torch.device] = set()

KERNEL_ROWS = 256
"""Smaller matrices have too few blocks for the Triton kernel to leave some out."""


def symmetric_product(
    a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0
) -> Tensor:
    """Write ``alpha * a @ b + beta * addend``, which must be symmetric, into ``out``.

    Args:
        a: (matrices, n, k).
        b: (matrices, k, n), of the same dtype.
        out: (matrices, n, n), memory of its own; returned.
        addend: (matrices, n, n), symmetric; None for none.
        beta: factor on ``addend``.
        alpha: factor on the product.
    """
    if a.device.type == "cpu":
        strip = STRIP_ROWS.get(a.dtype, STRIP_ROWS_OTHERWISE)
        if a.size(-2) >= 2 * strip:
            return _by_strips(a, b, out, addend, beta, alpha, strip)
    elif a.size(-2) >= KERNEL_ROWS and has_kernel(a.device, a.dtype):
        from lightning_asyncpp.optim.symmetric_triton import is_not_launched, triton_symmetric_product

        try:
            return triton_symmetric_product(a, b, out, addend, beta, alpha)
        except Exception as error:
            if not is_not_launched(error):
                raise
            _give_up_kernel(a.device, error)
    return full_product(a, b, out, addend, beta, alpha)


def full_product(
    a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0
) -> Tensor:
    """:func:`symmetric_product` by torch's own product: the reference, and any other product as well.

    Here ``addend`` has the shape of ``out``, and nothing needs to be symmetric.
    """
    if addend is None:
        return torch.bmm(a, b, out=out)
    return torch.baddbmm(addend, a, b, beta=beta, alpha=alpha, out=out)


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the Triton kernel works there: on NVIDIA GPUs from Ampere on, in 16 bits, where triton is installed.

    And where its blocks fit the device's shared memory, and the host can build what launches it, which only a launch
    tells.
    """
    return device not in _without_kernel and _may_have_kernel(device, dtype)


@cache
def _may_have_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    # In float32 its products would be those of TF32.
    if device.type != "cuda" or torch.version.hip or dtype not in (torch.bfloat16, torch.float16):
        return False
    return find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (8, 0)


def _give_up_kernel(device: torch.device, error: Exception) -> None:
    """Compute full products on a device from now on, and say so: results differ by rounding, and take longer."""
    _without_kernel.add(device)
    warnings.warn(
        f"the Triton kernel for symmetric products cannot run on {device} ({error}): Newton-Schulz computes full"
        " products there, which take up to twice as long",
        stacklevel=2,
    )


def _by_strips(
    a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None, beta: float, alpha: float, rows: int
) -> Tensor:
    # One matrix at a time: a batched product copies strips that are no whole matrices, and is slower than the full one.
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
