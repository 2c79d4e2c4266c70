"""An optimizer steps when its strategy applies an update, and at no other time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch.optim import Optimizer

from lightning_asyncpp.pipeline.errors import ConfigurationError


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
        """Let anybody step."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _check(self, *_: Any) -> None:
        if not self._is_updating():
            raise ConfigurationError(
                f"step() was called on {type(self._optimizer).__name__} itself (optimizer.optimizer.step(...)), where"
                " the gradient of its update is not there: call step() on what fabric.setup_optimizers(optimizer)"
                " returned, or what Lightning hands to optimizer_step"
            )
