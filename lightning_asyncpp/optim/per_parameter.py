"""The frame of optimizers that treat every parameter alike, each by itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from lightning_asyncpp.optim.checks import RULES, Rule, invalid, raise_problems


class PerParameter(ABC, Optimizer):
    """A torch optimizer whose update of a parameter sees nothing but this parameter, its gradient and its state.

    So a model cut into pipeline stages takes bitwise the steps of the whole one. The number of updates is counted per
    parameter: one that gets its first gradient late starts then, bias correction included. Hyper-parameters are read
    from the groups at each step; parameters whose gradient is None are left alone. Subclasses implement
    :meth:`update`.

    Args:
        params: tensors, (name, tensor) pairs or groups, as torch takes them.
        defaults: the hyper-parameters of groups that do not set them.

    Raises:
        ValueError: names all problems of the configuration at once.
    """

    rules: ClassVar[Mapping[str, Rule]] = RULES
    """What the hyper-parameters may be."""

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        problems = [
            f"{key} {mend}, got {group[key]!r}"
            for group in self.param_groups
            for key, mend in invalid(group, self.rules).items()
        ]
        unusual = {p.dtype for group in self.param_groups for p in group["params"] if not p.is_floating_point()}
        problems += [f"parameters must be real floating point numbers, got {dtype}" for dtype in unusual]
        raise_problems(type(self).__name__, problems)

    @abstractmethod
    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Update one parameter in place.

        Args:
            p: the parameter, without autograd.
            grad: its gradient; only read.
            state: what is kept for this parameter; empty at its first gradient.
            group: the hyper-parameters.
        """

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient; return what ``closure`` returned, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                update_parameters(group, self.state, self.update)
        return loss


def update_parameters(
    group: dict[str, Any],
    state: dict[Tensor, dict[str, Any]],
    update: Callable[[Tensor, Tensor, dict[str, Any], dict[str, Any]], None],
) -> None:
    """Call ``update(p, grad, state[p], group)`` for every parameter of ``group`` that has a gradient.

    Raises:
        RuntimeError: a gradient is sparse.
    """
    for p in group["params"]:
        if p.grad is None:
            continue
        if p.grad.is_sparse:
            raise RuntimeError("sparse gradients are not supported: make them dense (sparse=False)")
        update(p, p.grad, state[p], group)


def new_average(p: Tensor) -> Tensor:
    """Return zeros of the parameter's shape, dtype and strides, to average something in."""
    return torch.zeros_like(p, memory_format=torch.preserve_format)


def count(state: dict[str, Any]) -> int:
    """Add one update to ``state["step"]``, a 0-dim fp32 tensor on the CPU as torch's optimizers have it; return it."""
    if "step" not in state:
        state["step"] = torch.zeros(())
    state["step"] += 1
    return int(state["step"])


def adam_direction(mean: Tensor, mean_square: Tensor, step: int, betas: tuple[float, float], eps: float) -> Tensor:
    """Return Adam's step per unit of learning rate from its two averages after ``step`` updates, bias corrected.

    Source: Kingma & Ba 2015 (arXiv 1412.6980), Algorithm 1.
    """
    corrections = [1 - beta**step for beta in betas]
    denominator = mean_square.sqrt().div_(corrections[1] ** 0.5).add_(eps)
    return (mean / corrections[0]).div_(denominator)
