"""What a GPU keeps for the backward where the CPU keeps something else: plans for GPUs stand for the former.

There is no GPU where a plan is made, so operators run as on the CPU. The few that torch runs otherwise on CUDA, and
that language models are made of, are replaced: RMSNorm in one kernel, dropout with a mask of bytes, attention with
dropout without a matrix of scores, and what CUDA's autocast computes in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer

from lightning_asyncpp.optim import error_feedback, newton_schulz


@contextmanager
def kernels_of_gpu() -> Iterator[None]:
    """Replace operations meanwhile."""
    # Not by a mode of torch: what a checkpoint computes again in the backward would not see it.
    replacements: list[tuple[Any, str, Any]] = [(F, name, function) for name, function in _REPLACEMENTS.items()]
    # Optimizers that handle small pieces on a CPU: the Triton kernel of symmetric products is one operator here.
    replacements += [
        (error_feedback, "CPU_CHUNK_ELEMENTS", error_feedback.CHUNK_ELEMENTS),
        (newton_schulz, "symmetric_product", newton_schulz.full_product),
    ]
    with ExitStack() as stack:
        for owner, name, value in replacements:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


def as_on_gpu(optimizer: Optimizer) -> None:
    """Set what optimizers choose by themselves on a GPU: many tensors, or many matrices, in one kernel."""
    for group in optimizer.param_groups:
        undecided = [name for name in ("foreach", "batched") if name in group and group[name] is None]
        group.update(dict.fromkeys(undecided if not group.get("fused") else (), True))


def _rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """What LayerNorm's kernel keeps is what CUDA's for RMSNorm does, and one more number per row."""
    return F.layer_norm(input, normalized_shape, weight)  # the one that stands for it here


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p else input


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    # As positional arguments a mask and the dropout come first.
    kwargs = {**dict(zip(("attn_mask", "dropout_p", "is_causal"), args)), **kwargs, "dropout_p": 0.0}
    return _plain_attention(query, key, value, **kwargs)


def _in_fp32(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*map(_widened, args), **{name: _widened(value) for name, value in kwargs.items()})


def _widened(value: Any) -> Any:
    """A tensor of 16 bits as one of fp32 under autocast; everything else as it is."""
    if not isinstance(value, Tensor) or not torch.is_autocast_enabled("cpu"):
        return value
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


_plain_attention = F.scaled_dot_product_attention
_WIDENED = (F.layer_norm, F.group_norm, F.softmax, F.log_softmax, F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss)
_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    **{function.__name__: partial(_in_fp32, function) for function in _WIDENED},
    "rms_norm": _rms_norm,
    "dropout": _dropout,
    "scaled_dot_product_attention": _attention,
}
"""Name in torch.nn.functional -> what stands for it."""
