"""An optimizer's step under a pipeline: with the gradient that is there already, and at no other time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_asyncpp.core.optimizers.configured import name_of
from lightning_asyncpp.errors import ConfigurationError

DURING_AN_UPDATE = (
    "a checkpoint cannot be taken or loaded, nor weights gathered or evaluated, while an update is applied (in"
    " on_before_optimizer_step, configure_gradient_clipping or a hook of optimizer.step): a part of the update would be"
    " in it, and the run could not go on from there as it did; do that in on_train_batch_end of a callback"
    " (ModelCheckpoint saves every_n_train_steps), or in a loop over Fabric after optimizer.step()"
)


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


class StepGuard:
    """Refuses steps of an optimizer past its strategy, until :meth:`release`.

    Between updates there are no gradients, or they belong to weights of another version: such a step would train
    nothing, or something else, without a word.

    Args:
        optimizer: that is watched; one that keeps no hooks around its step is left alone.
        is_updating: whether an update is being applied.
    """

    def __init__(self, optimizer: Optimizer, is_updating: Callable[[], bool]) -> None:
        self._optimizer, self._is_updating, self._handle = optimizer, is_updating, None
        with suppress(AttributeError):  # a wrapper that was not made as an optimizer is
            self._handle = optimizer.register_step_pre_hook(self._check)

    def check_same(self, optimizer: object) -> None:
        """Refuse another optimizer in the place of the one that the training began with.

        Raises:
            ConfigurationError: it is another one.
        """
        if optimizer is not self._optimizer:
            raise ConfigurationError(
                f"the optimizer was replaced during the training ({type(self._optimizer).__name__} by"
                f" {type(optimizer).__name__}, as by trainer.optimizers = [...]), while an update of the one before is"
                " outstanding: change its param_groups in place, or train in two parts, the second from a checkpoint of"
                " the first"
            )

    def release(self) -> None:
        """Let anybody step, and whoever was asked for updates go."""
        if self._handle is not None:
            self._handle.remove()
        self._handle, self._is_updating = None, lambda: True

    def _check(self, *_: Any) -> None:
        if not self._is_updating():
            raise ConfigurationError(
                f"step() was called on {type(self._optimizer).__name__} itself (optimizer.optimizer.step(...)), where"
                " the gradient of its update is not there: call step() on what fabric.setup_optimizers(optimizer)"
                " returned, or what Lightning hands to optimizer_step"
            )


@dataclass
class Steps:
    """What happened to an optimizer.

    Attributes:
        called: its step was called.
        found_inf: what it was told of the gradients: above 0 if some are infinite, on their device.
    """

    called: bool = False
    found_inf: Tensor | None = None

    @property
    def taken(self) -> bool:
        """Whether it took a step; waits for the device if a scaler is at work."""
        return self.called and (self.found_inf is None or not bool(self.found_inf))


@contextmanager
def watch_steps(optimizer: Optimizer) -> Iterator[Steps]:
    """Tell whether ``optimizer`` takes a step meanwhile: a scaler of fp16 leaves those with infinite gradients out."""
    steps = Steps()

    def note(stepped: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        # A fused optimizer is called all the same, is told by this tensor, and leaves the weights as they are.
        steps.called, steps.found_inf = True, getattr(stepped, "found_inf", None)

    handle = optimizer.register_step_post_hook(note)
    try:
        yield steps
    finally:
        handle.remove()


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
