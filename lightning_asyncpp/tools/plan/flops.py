"""Operations of products that torch's own counter does not know: those of experts, and attention on a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_asyncpp.models import grouped_linear  # noqa: F401  (registers the operators)


def _grouped(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Of torch's grouped product: every row of ``a`` meets one matrix."""
    return 2 * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _looped(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    return 2 * math.prod(x.shape) * weight.shape[1]


def _looped_backward(grad: Tensor, x: Tensor, *_: Any, **__: Any) -> int:
    return 4 * math.prod(x.shape) * grad.shape[1]


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Scores, and the values that they weigh; every head of the queries has its own. A mask saves nothing."""
    *heads, length, width = query.shape
    return 2 * math.prod(heads) * length * key.shape[-2] * (width + value.shape[-1])


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Two products for each of the forward, and the scores once more."""
    *heads, length, width = query.shape
    return 2 * _attention(query, key, value) + 2 * math.prod(heads) * length * key.shape[-2] * width


FORMULAS: dict[Any, Callable[..., int]] = {
    torch.ops.lightning_asyncpp.loop_linear: _looped,
    torch.ops.lightning_asyncpp.loop_linear_backward: _looped_backward,
    # Those of torch 2.11 are not known to its counter.
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
"""Operator -> its floating-point operations, from its arguments."""
if hasattr(torch.ops.aten, "_grouped_mm"):  # since torch 2.8
    FORMULAS[torch.ops.aten._grouped_mm] = _grouped
