"""What a check trains, in stages and in a single process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.optim import Optimizer

from lightning_asyncpp.pipeline.batches.user_hooks import UserHooks
from lightning_asyncpp.pipeline.errors import ConfigurationError
from lightning_asyncpp.pipeline.settings import ResolvedSettings
from lightning_asyncpp.tools.check.hooks import HookCalls

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
            raise ConfigurationError(f"{type(module).__name__} has no self.model: assign the network to it")
        return network

    def hooks(self, module: nn.Module) -> UserHooks:
        """How batches are cut and weighed."""
        return UserHooks.of(module, model_name=name_of(self.network(module), module))

    def calls(self, module: nn.Module) -> HookCalls:
        """The hooks of a copy."""
        return HookCalls(module, self.seed, self.device, self.left_out)

    def optimizer(self, module: nn.Module) -> Optimizer:
        """A new one."""
        return self.make_optimizer(list(module.named_parameters()))


def network_of(module: nn.Module) -> Any:
    """What the step calls: ``self.model`` of a LightningModule, which may build it later."""
    return getattr(module, "model", None) if hasattr(module, "training_step") else module


def name_of(network: nn.Module, module: nn.Module) -> str:
    """How the user calls the model."""
    return "the model" if network is module else "self.model"


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
