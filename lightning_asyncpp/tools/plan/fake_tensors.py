"""Tensors with a shape and a dtype but no memory, a meter over them, and operators as a GPU runs them.

There is no GPU where a plan is made, so operators run as on the CPU. The few that torch runs otherwise on CUDA, and
that language models are made of, are replaced: RMSNorm in one kernel, dropout with a mask of bytes, attention with
dropout without a matrix of scores, and what CUDA's autocast computes in fp32.
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
"""Under it new tensors, and what is computed from them, have no memory. There is one, so that all of them may meet.

An operator that does not know the shape of its result must not be run on real zeros to find out.
"""


def empty_like(tensor: Tensor) -> Tensor:
    """Return a new tensor without memory of the same shape and dtype, on the CPU whatever device the other is on."""
    with FAKE:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def drop_memory(module: nn.Module) -> None:
    """Replace all parameters and buffers by :func:`empty_like` ones, shared ones by shared ones."""
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
    """Count scores, and the values that they weigh; every head of the queries has its own. A mask saves nothing."""
    return 2 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Count two products for each of the forward, and the scores once more."""
    return 2 * _attention(query, key, value) + 2 * math.prod(query.shape) * key.shape[-2]


FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    torch.ops.lightning_asyncpp.loop_linear: lambda x, weight, *_, **__: 2 * math.prod(x.shape) * weight.shape[1],
    torch.ops.lightning_asyncpp.loop_linear_backward: lambda g, x, *_, **__: 4 * math.prod(x.shape) * g.shape[1],
    # Every row of the first meets one matrix.
    torch.ops.aten._grouped_mm: lambda a, b, *_, **__: 2 * a.shape[-2] * a.shape[-1] * b.shape[-1],
    # Those of torch 2.11 are not known to its counter.
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
"""Operator -> its floating-point operations, from its arguments."""


@dataclass
class Reading:
    """What happened during a part of a run."""

    kept: int = 0  # bytes that are alive after it and were not before; negative if more was freed
    peak: int = 0  # most bytes alive at a time, above those before it
    moved: int = 0  # bytes that operators read and wrote, views left out
    flops: int = 0  # of matrix products and attention


class Meter(TorchDispatchMode):
    """Sees every operator, and the memory behind every result until it is freed; no kernel's own workspace.

    Args:
        before: tensors that are there already.
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
        """Run the operator and note what it made."""
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
        """Read what the body does; readings may not lie inside each other."""
        reading, before = Reading(), self.alive
        self._peak, self._moved, self._flops = self.alive, 0, 0
        yield reading
        reading.kept, reading.peak = self.alive - before, self._peak - before
        reading.moved, reading.flops = self._moved, self._flops

    def _note(self, tensor: Tensor) -> int:
        """Count the memory of a tensor if it is new; return its bytes then."""
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
    """Return the bytes of the memory behind tensors, what they share counted once."""
    storages = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())


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


def _attention_on_gpu(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    # As positional arguments a mask and the dropout come first.
    kwargs = {**dict(zip(("attn_mask", "dropout_p", "is_causal"), args)), **kwargs, "dropout_p": 0.0}
    return _sdpa(query, key, value, **kwargs)


def _in_fp32(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*map(_widened, args), **{name: _widened(value) for name, value in kwargs.items()})


def _widened(value: Any) -> Any:
    """A tensor of 16 bits as one of fp32 under autocast; everything else as it is."""
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
"""Name in torch.nn.functional -> what stands for it."""
