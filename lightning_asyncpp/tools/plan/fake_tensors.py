"""Tensors with a shape and a dtype but no memory, and a meter that counts bytes and operations over them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lightning_asyncpp.core.batches.structure import stands_for_tensors
from lightning_asyncpp.core.batches.tree import tensors_of
from lightning_asyncpp.models import grouped_linear  # noqa: F401  (registers the operators)

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
        if made or func._schema.is_mutable:
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
