"""What a check trains, in stages and in a single process, and the module's own hooks, called as the strategies do."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_asyncpp.core.batches.user_hooks import UserHooks
from lightning_asyncpp.core.cut.network import name_in_steps, network_in, no_network
from lightning_asyncpp.core.randomness import derive, seeded
from lightning_asyncpp.core.settings import ResolvedSettings
from lightning_asyncpp.errors import ConfigurationError

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


StepOf = Callable[[Any, Any], Any]
MakeOptimizer = Callable[[Any], Optimizer]


class Trial(NamedTuple):
    """What both sides train.

    Attributes:
        module: with real weights, which all sides start from.
        step: (module, micro-batch) -> loss.
        batches: one for every update.
        settings: of the pipeline.
        make_optimizer: named parameters -> optimizer.
        max_norm: clip the gradient's norm to this.
        seed: of the run.
        left_out: gets the names of hooks that could not be called.
    """

    module: nn.Module
    step: StepOf
    batches: Sequence[Any]
    settings: ResolvedSettings
    make_optimizer: MakeOptimizer
    max_norm: float | None
    seed: int
    left_out: set[str]

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    @staticmethod
    def network(module: nn.Module) -> nn.Module:
        """What the step calls: ``self.model`` of a LightningModule."""
        network = network_of(module)
        if not isinstance(network, nn.Module):
            raise ConfigurationError(no_network(module))
        return network

    def hooks(self, module: nn.Module) -> UserHooks:
        """How batches are cut and weighed."""
        return UserHooks.of(module, model_name=name_of(self.network(module), module))

    def pieces(self, module: nn.Module, batch: Any) -> list[Any]:
        """The micro-batches of a batch that hold anything."""
        return [
            piece for piece in self.hooks(module).split_batch(batch, self.settings.micro_batches) if piece is not None
        ]

    def calls(self, module: nn.Module) -> HookCalls:
        """The hooks of a copy."""
        return HookCalls(module, self.seed, self.device, self.left_out)

    def optimizer(self, module: nn.Module) -> Optimizer:
        """A new one."""
        return self.make_optimizer(list(module.named_parameters()))


def network_of(module: nn.Module) -> Any:
    """What the step calls: the network of a LightningModule, which may build it later."""
    return network_in(module) if hasattr(module, "training_step") else module


def name_of(network: nn.Module, module: nn.Module) -> str:
    """How the user calls the model."""
    return "the model" if network is module else name_in_steps(module)


def copied(module: nn.Module) -> nn.Module:
    """A copy of the user's module that has its model, and logs nothing."""
    prototype = copy.deepcopy(module)
    if isinstance(prototype, LightningModule):
        prototype.log = prototype.log_dict = _log_nothing  # type: ignore[method-assign]
        prototype.configure_model()
    return prototype


def training_step(module: Any, micro_batch: Any) -> Any:
    """Call it as the Trainer does."""
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    try:
        return module.training_step(micro_batch, *([0] if takes_index else []))
    except RuntimeError as error:
        if "is not attached to a `Trainer`" not in str(error):
            raise
        raise ConfigurationError(
            "training_step asks for its Trainer, and there is none in a check: give check_model a step, a function"
            " (module, micro_batch) -> loss that calls the model once and needs no Trainer"
        ) from error


def default_optimizer(named_parameters: Any) -> Optimizer:
    """What trains where nothing else is asked for."""
    return torch.optim.SGD(named_parameters, lr=0.01)


def _log_nothing(*_: Any, **__: Any) -> None:
    """What ``self.log`` does in a check."""
