"""Muon's update of one parameter group: momentum, orthogonalisation, decoupled weight decay."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_asyncpp.optim.newton_schulz import orthogonalize

BATCH_ELEMENTS = 2**25
"""Elements joined into one product: enough to fill a GPU, small beside the model (64 MiB in bfloat16)."""

ADDED_LATER = {"newton_schulz_form": "direct"}
"""See :attr:`lightning_asyncpp.optim.composite.MatrixAdamW.added_later`."""

REMOVED = {"newton_schulz": "quintic", "newton_schulz_scale": "frobenius"}
"""See :attr:`lightning_asyncpp.optim.composite.MatrixAdamW.removed`."""


class Stack(NamedTuple):
    """Views of a weight, its gradient and its momentum, each of shape (matrices, rows, columns): a row is a neuron.

    Attributes:
        fan_out: number of neurons.
        fan_in: number of weights of each neuron.
        second_moment: what a rule that scales single neurons keeps of each, (matrices, rows, 1).
    """

    weight: Tensor
    grad: Tensor
    momentum: Tensor
    fan_out: int
    fan_in: int
    second_moment: Tensor | None


Scale = Callable[[Tensor, Stack, dict[str, Any]], tuple[Tensor, float]]
"""From orthogonalised directions (matrices, rows, columns), their stack and group: the directions, and the factor on
the learning rate."""


def scale_by_shape(directions: Tensor, stack: Stack, group: dict[str, Any]) -> tuple[Tensor, float]:
    """Muon's own scale: the directions as they are, times :func:`lr_scale`."""
    return directions, lr_scale(group["adjust_lr"], stack.fan_out, stack.fan_in)


@torch.no_grad()
def muon_step(group: dict[str, Any], state: dict[Tensor, dict[str, Any]], scale: Scale = scale_by_shape) -> None:
    """Update every parameter of ``group`` that has a gradient.

    Args:
        group: the parameters and Muon's hyper-parameters.
        state: of each parameter; the momentum is ``state[p]["momentum_buffer"]``, made at the first gradient. A
            ``"second_moment_buffer"``, where there is one, is handed to ``scale``.
        scale: what becomes of the orthogonalised directions.
    """
    params = [p for p in group["params"] if p.grad is not None]
    for p in params:
        if p.grad.is_sparse:
            raise RuntimeError("Muon does not support sparse gradients: make them dense (sparse=False)")
        if "momentum_buffer" not in state[p]:
            state[p]["momentum_buffer"] = torch.zeros_like(p.grad, memory_format=torch.preserve_format)
    stacks = [stack for p in params for stack in _stacks(p, state[p])]
    for batch in _batches(stacks, group["batched"]):
        _step_batch(batch, group, scale)


def lr_scale(adjust_lr: str, fan_out: int, fan_in: int) -> float:
    """Return the factor on a matrix's learning rate, as ``adjust_lr_fn`` of torch.optim.Muon."""
    if adjust_lr == "original":
        return math.sqrt(max(1, fan_out / fan_in))
    return 0.2 * math.sqrt(max(fan_out, fan_in))


def _step_batch(batch: list[Stack], group: dict[str, Any], scale: Scale) -> None:
    lr, momentum = group["lr"], group["momentum"]
    momenta = []
    for stack in batch:
        stack.momentum.lerp_(stack.grad, 1 - momentum)
        momenta.append(stack.grad.lerp(stack.momentum, momentum) if group["nesterov"] else stack.momentum)
    steps = orthogonalize(
        momenta,
        steps=group["newton_schulz_steps"],
        coefficients=tuple(group["coefficients"]),
        dtype=getattr(torch, group["newton_schulz_dtype"]),
        form=group["newton_schulz_form"],
    ).split([stack.weight.size(0) for stack in batch])
    for stack, step in zip(batch, steps):
        directions, factor = scale(step, stack, group)
        stack.weight.mul_(1 - lr * group["weight_decay"])
        stack.weight.add_(directions, alpha=-lr * factor)


def _stacks(p: Tensor, state: dict[str, Any]) -> Iterator[Stack]:
    """Cut a weight into stacks of bounded size, a rule that sees nothing but this weight's own shape."""
    kept = [p.detach(), p.grad, state["momentum_buffer"], state.get("second_moment_buffer")]
    views = [t if t.ndim == 3 else t.unsqueeze(0) for t in kept if t is not None]
    matrices = max(1, BATCH_ELEMENTS // math.prod(p.shape[-2:]))
    fan_out, fan_in = p.shape[-2:]  # as nn.Linear keeps them, alone and in a stack of experts
    for weight, grad, momentum, *moment in zip(*(view.split(matrices) for view in views)):
        yield Stack(weight, grad, momentum, fan_out, fan_in, moment[0] if moment else None)


def _batches(stacks: list[Stack], batched: bool | None) -> Iterator[list[Stack]]:
    """Join stacks of equal matrices up to ``BATCH_ELEMENTS``."""
    batches: dict[Any, list[Stack]] = {}
    elements: dict[Any, int] = {}
    for stack in stacks:
        key, size = (stack.weight.shape[-2:], stack.weight.device), stack.weight.numel()
        full = elements.get(key, 0) + size > BATCH_ELEMENTS
        if key in batches and (full or not _may_batch(stack.weight.device, batched)):
            yield batches.pop(key)
            elements[key] = 0
        batches.setdefault(key, []).append(stack)
        elements[key] = elements.get(key, 0) + size
    yield from batches.values()


def _may_batch(device: torch.device, batched: bool | None) -> bool:
    if batched is not None:
        return batched
    # On a CPU a batched product is no faster. On a GPU the library may choose another kernel for another batch size,
    # so whoever asks for deterministic results gets them independent of which matrices share a stage.
    return device.type != "cpu" and not torch.are_deterministic_algorithms_enabled()
