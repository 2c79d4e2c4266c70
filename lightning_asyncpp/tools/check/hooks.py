"""The module's own hooks around a batch and an update, called in a check where the strategies have them called."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_asyncpp.pipeline.errors import ConfigurationError
from lightning_asyncpp.pipeline.randomness import derive, seeded

_OF_BATCHES = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_NOT_CALLED = (
    "configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "on_before_zero_grad",
    "on_before_backward", "on_after_backward",
)  # fmt: skip
_NO_TRAINER = "is not attached to a `Trainer`"


class HookCalls:
    """Calls the hooks of one copy of the module; those that ask for their Trainer are left out and named.

    ``on_train_batch_end`` comes after the batch's own update: what it writes into weights is part of W_{t+1}. In a
    pipeline that is one batch later.

    Args:
        module: its hooks are called if it is a LightningModule.
        seed: of the run.
        device: of the model.
        left_out: gets the names of hooks that could not be called.
    """

    def __init__(self, module: nn.Module, seed: int, device: torch.device, left_out: set[str]) -> None:
        self.module, self.seed, self.device, self.left_out = module, seed, device, left_out
        self._batches: dict[int, Any] = {}

    def prepared(self, batch: Any, index: int) -> Any:
        """The batch as ``training_step`` gets it; hooks that prepare it draw the same random numbers on all stages."""
        with seeded(derive(self.seed, "batch", index), self.device):
            for name in _OF_BATCHES:
                more = (self.device, 0) if name == "transfer_batch_to_device" else (0,)
                batch = self._call(name, batch, batch, *more)
        self._batches[index] = batch
        return batch

    def start(self, index: int) -> None:
        """Before a batch.

        Raises:
            ConfigurationError: weights were written.
        """
        if not self._has("on_train_batch_start"):
            return
        before = {name: parameter.detach().clone() for name, parameter in self.module.named_parameters()}
        self._call("on_train_batch_start", None, self._batches[index], index)
        written = [n for n, p in self.module.named_parameters() if n in before and not torch.equal(p, before[n])]
        if written:
            raise ConfigurationError(
                f"on_train_batch_start changes weights ({', '.join(written[:5])}), between two updates: a gradient that"
                " is under way was not taken at them; change them in on_train_batch_end, which counts as a part of the"
                " batch's own update"
            )

    def before_step(self, optimizer: Optimizer) -> None:
        """The gradient is complete."""
        self._call("on_before_optimizer_step", None, optimizer)

    def end(self, index: int) -> None:
        """The batch's own update was applied."""
        outputs = {"loss": torch.full((), math.nan, device=self.device)}
        self._call("on_train_batch_end", None, outputs, self._batches.pop(index), index)

    def _has(self, name: str) -> bool:
        return isinstance(self.module, LightningModule) and is_overridden(name, self.module)

    def _call(self, name: str, default: Any, *args: Any) -> Any:
        if not self._has(name):
            return default
        hook: Callable[..., Any] = getattr(self.module, name)
        try:
            return hook(*args)
        except RuntimeError as error:
            if _NO_TRAINER not in str(error):
                raise
            self.left_out.add(name)
            return default


def notes_on_hooks(module: nn.Module, left_out: set[str]) -> list[str]:
    """What of a module's hooks is not part of what was compared."""
    notes = []
    if left_out:
        notes.append(f"not called, since they ask for their Trainer and there is none: {', '.join(sorted(left_out))}")
    others = [n for n in _NOT_CALLED if isinstance(module, LightningModule) and is_overridden(n, module)]
    if others:
        notes.append(
            f"not called by a check: {', '.join(others)}; delayed_gradient(micro_batches=...) trains with them"
        )
    return notes


def largest_gradients(named: dict[str, nn.Parameter], largest: dict[str, Tensor]) -> None:
    """Keep the largest absolute value of every element of the gradients so far."""
    for name, parameter in named.items():
        if parameter.grad is not None:
            gradient = parameter.grad.detach().abs()
            gradient = gradient.to_dense() if gradient.is_sparse else gradient
            largest[name] = torch.maximum(largest[name], gradient) if name in largest else gradient.clone()
