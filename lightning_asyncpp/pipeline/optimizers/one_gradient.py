"""The closure of a step whose gradient is there already."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from lightning_asyncpp.pipeline.errors import ConfigurationError
from lightning_asyncpp.pipeline.optimizers.naming import name_of


class OneGradient:
    """A closure for optimizers that returns what is known already, and sees that no other gradient is wanted.

    Made directly before the step: what the weights and gradients are then, they must still be when it is evaluated.

    Args:
        optimizer: that is about to step.
        result: of the one evaluation.
    """

    def __init__(self, optimizer: Optimizer, result: Any = None) -> None:
        self.optimizer, self.result, self.calls = optimizer, result, 0
        self._known = self._writes()

    def __call__(self) -> Any:
        """Return the result.

        Raises:
            ConfigurationError: the second time, or where weights or gradients were changed first.
        """
        self.calls += 1
        if self.calls > 1 or self._writes() != self._known:
            raise ConfigurationError(several_gradients(self.optimizer))
        return self.result

    def check_called(self) -> None:
        """Raise ConfigurationError if the step did without the closure, in which Lightning does more than is here."""
        if not self.calls:
            raise ConfigurationError(no_closure(self.optimizer))

    def _writes(self) -> list[Any]:
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        return [(p._version, None if p.grad is None else (id(p.grad), p.grad._version)) for p in held]


def several_gradients(optimizer: Optimizer) -> str:
    """Message about an optimizer for which one gradient per step is not enough."""
    return (
        f"{name_of(optimizer)} evaluates the loss several times per step, or changes weights or gradients before it"
        " does (as LBFGS and SAM), but here every step has one gradient, which was taken before; use an optimizer whose"
        " step() evaluates its closure once, first of all"
    )


def no_closure(optimizer: Optimizer) -> str:
    """Message about an optimizer that ignores what Lightning does in a closure."""
    return (
        f"{name_of(optimizer)}.step() never evaluates its closure, in which Lightning clips gradients and calls"
        " on_before_optimizer_step (and, without this strategy, trains at all): let step() call it once, first of all"
    )
