"""Fake tensors (with shape and dtype but no data), a meter of memory and work, and stand-ins for GPU kernels.

A plan is made without a GPU, so operators run as on the CPU. Some operators of language models need a different amount
of memory on CUDA, and are replaced by stand-ins that need as much as on CUDA. On CUDA, RMSNorm is one kernel, dropout
keeps a mask of bytes, attention with dropout keeps no matrix of scores, and autocast runs more operators in fp32.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lightning_asyncpp.core.tree import stands_for_tensors, tensors_of
from lightning_asyncpp.models import grouped_linear  # noqa: F401  (registers the operators)
from lightning_asyncpp.optim import error_feedback, newton_schulz

stands_for_tensors(FakeTensor)


FAKE = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
"""Mode that makes all new tensors fake. There is only one, since fake tensors of two modes cannot be mixed.

An operator without a rule for the shape of its result raises an error; by default, torch would run it on real zeros.
"""


def empty_like(tensor: Tensor) -> Tensor:
    """Return a fake tensor of the same shape and dtype, on the CPU."""
    with FAKE:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def drop_memory(module: nn.Module) -> None:
    """Replace all parameters and buffers by fake tensors; shared ones stay shared."""
    made: dict[Tensor, Tensor] = {}
    for part in module.modules():
        parameters = part.named_parameters(recurse=False, remove_duplicate=False)
        buffers = part.named_buffers(recurse=False, remove_duplicate=False)
        for name, tensor in (*parameters, *buffers):
            if tensor not in made:
                new = empty_like(tensor)
                is_parameter = isinstance(tensor, nn.Parameter)
                made[tensor] = nn.Parameter(new, requires_grad=tensor.requires_grad) if is_parameter else new
            setattr(part, name, made[tensor])


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Return the floating-point operations of the scores and the weighted values; masked scores count, too."""
    return 2 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Return the floating-point operations of the backward: twice the forward's, plus the scores again."""
    return 2 * _attention(query, key, value) + 2 * math.prod(query.shape) * key.shape[-2]


FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    torch.ops.lightning_asyncpp.loop_linear: lambda x, weight, *_, **__: 2 * math.prod(x.shape) * weight.shape[1],
    torch.ops.lightning_asyncpp.loop_linear_backward: lambda g, x, *_, **__: 4 * math.prod(x.shape) * g.shape[1],
    # Every row of the first operand is multiplied with one matrix.
    torch.ops.aten._grouped_mm: lambda a, b, *_, **__: 2 * a.shape[-2] * a.shape[-1] * b.shape[-1],
    # torch's counter does not know these operators of torch 2.11.
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
"""Operator -> function that returns its number of floating-point operations from its arguments."""


@dataclass
class Reading:
    """Memory and work of a part of a run."""

    kept: int = 0  # bytes allocated minus bytes freed
    peak: int = 0  # peak of allocated bytes, minus the bytes allocated at the beginning
    moved: int = 0  # bytes that operators read and wrote, without views
    flops: int = 0  # floating-point operations of matrix products and attention


class Meter(TorchDispatchMode):
    """Mode that measures the memory and work of all operators, without the workspaces of kernels.

    Args:
        before: tensors that exist already, whose memory is not new.
    """

    def __init__(self, before: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.alive = 0
        self._peak = 0
        self._moved = 0
        self._flops = 0
        self._known: dict[int, weakref.ref] = {}
        for tensor in before:
            self._note(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run the operator and measure its results."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        made = sum(self._note(tensor) for tensor in tensors_of(result))
        if made or func.overloadpacket.__name__.endswith("_"):  # in place
            self._moved += made + sum(tensor.nbytes for tensor in tensors_of((args, kwargs)))
        if (formula := FORMULAS.get(func.overloadpacket)) is not None:
            self._flops += formula(*args, **kwargs, out_val=result)
        return result

    @contextmanager
    def reading(self) -> Iterator[Reading]:
        """Measure a ``with`` block; blocks must not be nested."""
        reading, before = Reading(), self.alive
        self._peak, self._moved, self._flops = self.alive, 0, 0
        yield reading
        reading.kept, reading.peak = self.alive - before, self._peak - before
        reading.moved, reading.flops = self._moved, self._flops

    def _note(self, tensor: Tensor) -> int:
        """Count the memory of a tensor if it is new; return its bytes, or 0."""
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._known:
            return 0

        def release(_: object) -> None:
            self.alive -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, release)
        self.alive += size
        self._peak = max(self._peak, self.alive)
        return size


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors' storages; a shared storage counts once."""
    storages = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())


@contextmanager
def kernels_of_gpu() -> Iterator[None]:
    """Replace operators by stand-ins for GPU kernels."""
    # A mode of torch would not be active when the backward recomputes checkpointed activations.
    replacements: list[tuple[Any, str, Any]] = [(F, name, function) for name, function in _REPLACEMENTS.items()]
    # On a GPU, optimizers work in larger chunks, and compute a symmetric product in one operator.
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
    """Set the options that are on by default on a GPU: many tensors, or many matrices, in one kernel."""
    for group in optimizer.param_groups:
        undecided = [name for name in ("foreach", "batched") if name in group and group[name] is None]
        group.update(dict.fromkeys(undecided if not group.get("fused") else (), True))


def _rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Run LayerNorm, which keeps as much for the backward as CUDA's RMSNorm, plus one number per row."""
    return F.layer_norm(input, normalized_shape, weight)  # kernels_of_gpu() replaces F.layer_norm, too


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p else input


def _attention_on_gpu(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    # Without dropout, attention keeps no matrix of scores on the CPU either.
    kwargs = {**dict(zip(("attn_mask", "dropout_p", "is_causal"), args)), **kwargs, "dropout_p": 0.0}
    return _sdpa(query, key, value, **kwargs)


def _in_fp32(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*map(_widened, args), **{name: _widened(value) for name, value in kwargs.items()})


def _widened(value: Any) -> Any:
    """Return a 16-bit tensor in fp32 under autocast, and any other value unchanged."""
    if not isinstance(value, Tensor) or not torch.is_autocast_enabled("cpu"):
        return value
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


_sdpa = F.scaled_dot_product_attention
_WIDENED = (F.layer_norm, F.group_norm, F.softmax, F.log_softmax, F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss)
_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    **{function.__name__: partial(_in_fp32, function) for function in _WIDENED},
    "rms_norm": _rms_norm,
    "dropout": _dropout,
    "scaled_dot_product_attention": _attention_on_gpu,
}
"""Name of a function in torch.nn.functional -> its stand-in."""
