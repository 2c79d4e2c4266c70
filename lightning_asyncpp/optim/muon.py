"""One optimizer for a whole model: Muon for hidden matrices, AdamW for everything else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lightning_asyncpp.optim.composite import MatrixAdamW
from lightning_asyncpp.optim.newton_schulz import COEFFICIENTS, orthogonalize
from lightning_asyncpp.optim.split import DEFAULT_ADAMW_NAMES

BATCH_ELEMENTS = 2**25
"""Elements joined into one product: enough to fill a GPU, small beside the model (64 MiB in bfloat16)."""

ADDED_LATER = {"newton_schulz_form": "direct"}
"""See :attr:`lightning_asyncpp.optim.composite.MatrixAdamW.added_later`."""

REMOVED = {"newton_schulz": "quintic", "newton_schulz_scale": "frobenius"}
"""See :attr:`lightning_asyncpp.optim.composite.MatrixAdamW.removed`."""


class MuonAdamW(MatrixAdamW):
    """Muon for hidden weight matrices and AdamW for embeddings, the output head, norms, biases and vectors.

    Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; ``torch.optim.Muon``): the momentum of each
    matrix is orthogonalised by a few Newton-Schulz iterations, so that a step moves all directions alike. Which
    parameter goes where is the rule in :func:`lightning_asyncpp.optim.split.algorithm_for`.

    ``param_groups`` are always two, ``muon`` and ``adamw`` in this order, also where one is empty, so every pipeline
    stage shows schedulers and learning-rate monitors the same groups. All hyper-parameters are read from the groups at
    each step. A matrix is updated as ``torch.optim.Muon`` does it; a 3-D weight (experts, out, in) as its experts'
    ``nn.Linear`` weights (out, in) one by one; the rest exactly as ``torch.optim.AdamW``. Parameters whose gradient is
    None are left alone.

    Memory: one buffer per Muon parameter and two per AdamW parameter, in the parameter's dtype, and temporaries for
    about 2**25 elements at a time. On CPUs without bfloat16 units choose ``newton_schulz_dtype="float32"``: bfloat16
    products are some 30 times slower there.

    Args:
        params: ``module.named_parameters()``, or groups ``{"params": ..., "algorithm": "muon" | "adamw"}`` of tensors
            with or without names. Unnamed tensors alone do only if none of them is a matrix.
        lr: step size of Muon; with ``match_rms_adamw`` it is on AdamW's scale.
        adamw_lr: step size of AdamW; None: ``lr``.
        momentum: decay of Muon's gradient average, in [0, 1).
        nesterov: look one momentum step ahead.
        weight_decay: decoupled decay per step in units of the learning rate, for both algorithms.
        adamw_weight_decay: the same for AdamW alone; None: ``weight_decay``.
        adamw_betas: decay of AdamW's averages of the gradient and of its square.
        adamw_eps: added to AdamW's denominator.
        newton_schulz_steps: iterations per matrix.
        coefficients: of the quintic iteration.
        adjust_lr: "match_rms_adamw": lr * 0.2 * sqrt(max(fan_out, fan_in)); "original": lr * sqrt(max(1, fan_out /
            fan_in)). The meanings of ``adjust_lr_fn`` in ``torch.optim.Muon``.
        newton_schulz_dtype: "bfloat16" (as torch), "float32" or "float64", or the torch dtype.
        adamw_names: regular expression searched in parameter names; matching parameters go to AdamW.
        batched: join equal shapes into one product. None: on GPUs, unless deterministic algorithms are asked for
            (``torch.use_deterministic_algorithms``), where a matrix's bits could depend on its neighbours.
        newton_schulz_form: "direct", as torch; "gram" (arXiv 2505.16932, appendix F): fewer operations for matrices
            that are not square, other rounding. See :func:`lightning_asyncpp.optim.newton_schulz.orthogonalize`.

    Raises:
        ValueError: names all problems of the configuration at once.
    """

    matrix_algorithm = "muon"
    added_later = ADDED_LATER
    removed = REMOVED

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        adamw_lr: float | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        adamw_weight_decay: float | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        newton_schulz_steps: int = 5,
        coefficients: tuple[float, float, float] = COEFFICIENTS,
        adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
        newton_schulz_dtype: str | torch.dtype = "bfloat16",
        adamw_names: str = DEFAULT_ADAMW_NAMES,
        batched: bool | None = None,
        newton_schulz_form: Literal["direct", "gram"] = "direct",
    ) -> None:
        muon = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "newton_schulz_steps": newton_schulz_steps,
            "coefficients": coefficients,
            "adjust_lr": adjust_lr,
            "newton_schulz_dtype": newton_schulz_dtype,
            "batched": batched,
            "newton_schulz_form": newton_schulz_form,
        }
        adamw = {"lr": adamw_lr, "weight_decay": adamw_weight_decay, "betas": adamw_betas, "eps": adamw_eps}
        super().__init__(params, adamw_names, muon, adamw)

    def step_matrices(self, group: dict[str, Any]) -> None:
        """Take Muon's step."""
        muon_step(group, self.state)


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
