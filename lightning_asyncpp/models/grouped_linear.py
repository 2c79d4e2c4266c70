"""One linear map per group of rows, by torch's grouped matmul or by a loop over the groups.

The grouped matmul supports only some dtypes, and rows of a multiple of 16 bytes. It is used if a trial on the given
device and dtype, with groups of several sizes, gives the right product and gradients. The loop reads the sizes of the
groups on the host. So the loop is a custom operator, which compilers treat as opaque, and makes the host wait for the
GPU. The grouped matmul's bf16 kernel does not make the host wait.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor, grouped: bool) -> Tensor:
    """Multiply each row of ``x`` with the transposed weight of its group, as ``F.linear`` does with one weight.

    Args:
        x: (rows, in), sorted by group.
        weight: (groups, out, in), in the dtype of ``x``.
        ends: (groups,) int32, the end of each group's rows.
        grouped: whether to use torch's grouped matmul; see :func:`serves_grouped`.

    Returns:
        (rows, out).
    """
    if grouped:
        product: Tensor = F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)
        return product
    looped: Tensor = loop_linear(x, weight, ends)
    return looped


@torch.library.custom_op("lightning_asyncpp::loop_linear", mutates_args=())
def loop_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Compute :func:`grouped_linear` by a loop over the groups."""
    y = x.new_empty(x.shape[0], weight.shape[1])
    for group, rows in enumerate(_slices(ends)):
        torch.mm(x[rows], weight[group].T, out=y[rows])
    return y


@torch.library.custom_op("lightning_asyncpp::loop_linear_backward", mutates_args=())
def _loop_linear_backward(grad: Tensor, x: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows (rows, in) and weights (groups, out, in) from that of the result (rows, out)."""
    grad = grad.contiguous()
    grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
    for group, rows in enumerate(_slices(ends)):
        torch.mm(grad[rows], weight[group], out=grad_x[rows])
        torch.mm(grad[rows].T, x[rows], out=grad_weight[group])  # zeros for a group without rows
    return grad_x, grad_weight


def _slices(ends: Tensor) -> list[slice]:
    stops = ends.tolist()
    return [slice(start, stop) for start, stop in zip([0, *stops], stops)]


@loop_linear.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@_loop_linear_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _keep(ctx, inputs: tuple, output: Tensor) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[no-untyped-def]
    grad_x, grad_weight = _loop_linear_backward(grad, *ctx.saved_tensors)
    return grad_x, grad_weight, None


loop_linear.register_autograd(_backward, setup_context=_keep)


def serves_grouped(device: torch.device, dtype: torch.dtype, in_features: int, out_features: int) -> bool:
    """Return whether torch's grouped matmul gives the loop's results for such weights, by one trial."""
    # Only a width's remainder modulo 16 bytes matters; a trial with full widths would take as much memory as real
    # experts.
    small = (width if width < 128 else 64 + width % 64 for width in (in_features, out_features))
    return _trial(device, dtype, *small)


@cache
def _trial(device: torch.device, dtype: torch.dtype, in_features: int, out_features: int) -> bool:
    with torch.inference_mode(False), torch.enable_grad():
        try:
            # Try on the meta device first, since compilers trace with such tensors.
            tried = _results(torch.device("meta"), dtype, in_features, out_features, grouped=True)
            if device.type != "meta":
                tried = _results(device, dtype, in_features, out_features, grouped=True)
        except (RuntimeError, NotImplementedError):
            return False
        looped = _results(device, dtype, in_features, out_features, grouped=False)
    return device.type == "meta" or all(map(_close, tried, looped))


def _results(
    device: torch.device, dtype: torch.dtype, in_features: int, out_features: int, grouped: bool
) -> list[Tensor]:
    """Return the product and both gradients for four groups of rows, one of them empty and one of a single row."""
    ends = torch.tensor([3, 3, 8, 9], dtype=torch.int32, device=device)
    x = _numbers((9, in_features), device, dtype).requires_grad_()
    weight = _numbers((4, out_features, in_features), device, dtype).requires_grad_()
    y = grouped_linear(x, weight, ends, grouped)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), _numbers((9, out_features), device, dtype))]


def _close(a: Tensor, b: Tensor) -> bool:
    tolerance = 16 * torch.finfo(b.dtype).eps
    return torch.allclose(a.float(), b.float(), rtol=tolerance, atol=tolerance * float(b.abs().max()))


def _numbers(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return values between -1 and 1 without drawing random numbers."""
    size = torch.Size(shape).numel()
    return torch.arange(size, device=device, dtype=torch.float32).mul(0.7).sin().view(shape).to(dtype)
