"""Checks of the Trainer, its callbacks and the module at set-up, and the module's example input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
    SpikeDetection,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins import Precision
from torch import device, nn
from torch.optim import Optimizer

from lightning_asyncpp.core.cut.network import called_by_steps, name_in_steps, network_in, no_network
from lightning_asyncpp.core.cut.partition_choice import Example, example_of
from lightning_asyncpp.core.cut.units import model_problems
from lightning_asyncpp.core.microbatch import ModelCall, problems_of_reduction
from lightning_asyncpp.core.settings import problems_of_precision, problems_of_weight_dtype

ONE_OPTIMIZER = (
    "configure_optimizers returned more than one optimizer (multiple optimizers): a pipeline has exactly one update per"
    " mini-batch; use one optimizer with parameter groups (MuonAdamW splits its parameters by itself)"
)
NOTHING_TO_STEP = (
    "optimizer.step() was called without a gradient: no closure has run since the previous step; call"
    " optimizer.step(closure=optimizer_closure), or call the closure first"
)
_CALLBACKS: tuple[tuple[type, str], ...] = (
    (StochasticWeightAveraging, "it averages a whole model and swaps weights, but each rank holds one stage"),
    (ModelPruning, "it rewrites parameters while two versions of them are alive"),
    (BaseFinetuning, "it freezes and unfreezes parameters while the engine holds two versions of the trainable ones"),
    (LearningRateFinder, "it runs and rolls back training by itself; search with single runs of a few hundred steps"),
    (SpikeDetection, "it compares the loss of every rank in every batch, but only the last stage has it"),
    (BatchSizeFinder, "it needs an out-of-memory error on all ranks at once; choose batch_size by hand"),
)


def trainer_problems(trainer: L.Trainer, weight_dtype: str | None = None) -> list[str]:
    """Return the reasons why a pipeline cannot run with the Trainer's arguments and callbacks."""
    problems = problems_of_weight_dtype(weight_dtype, str(trainer.precision)) + problems_of_precision(trainer.precision)
    if getattr(trainer, "val_check_interval", None) is None:
        problems.append(
            "val_check_interval is a time, so every rank would decide by its own clock; give a number of batches"
        )
    if weight_dtype is not None and any(isinstance(c, WeightAveraging) for c in trainer.callbacks):  # type: ignore[attr-defined]
        problems.append(
            f"weight_dtype={weight_dtype!r} with a callback that averages weights: the callback would read and swap the"
            " fp32 masters in place of the weights that are validated; leave weight_dtype out"
        )
    return problems + [
        f"{type(callback).__name__} cannot work under a pipeline: {reason}; leave it out"
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        for refused, reason in _CALLBACKS
        if isinstance(callback, refused)
    ]


def module_problems(module: LightningModule) -> list[str]:
    """Return the reasons why a pipeline cannot train a LightningModule."""
    problems = []
    if not module.automatic_optimization:
        problems.append(
            "automatic_optimization=False: with manual optimization the module decides when to step, but an update"
            " may come one batch after its gradient; use automatic optimization"
        )
    network, name = network_in(module), name_in_steps(module)
    if network is None:
        problems.append(no_network(module))
    else:
        problems += model_problems(network, name)
    return problems + problems_of_reduction(getattr(module, "loss_reduction", "mean"))


def optimizer_problem(optimizers: Sequence[Optimizer]) -> str:
    """Return the reason why a pipeline cannot use the result of ``configure_optimizers``; empty if it can."""
    if len(optimizers) > 1:
        return ONE_OPTIMIZER
    if not optimizers or not any(group["params"] for group in optimizers[0].param_groups):
        return (
            "configure_optimizers returned no optimizer: a pipeline trains with exactly one. Return one over"
            " self.parameters() or self.named_parameters()"
        )
    return ""


def modules_example(
    module: LightningModule, network: nn.Module, microbatches: int, precision: Precision, device: device
) -> Example | None:
    """Return the network's arguments for the module's ``example_input_array``; None if the module has no example.

    The module's ``forward`` is run up to its call of the network. A module without ``forward`` has the network's input
    as its example.
    """

    def through(*args: Any, **kwargs: Any) -> tuple[tuple, dict[str, Any]]:
        return ModelCall(called_by_steps(network)).capture(lambda: module(*args, **kwargs))

    has_forward = type(module).forward is not LightningModule.forward
    given = module.example_input_array
    return example_of(given, microbatches, precision, device, through if has_forward else None)


def optimizers_in(configured: Any) -> list[Optimizer]:
    """Return the optimizers in the result of ``configure_optimizers``, in any of Lightning's forms."""
    if isinstance(configured, Optimizer):
        return [configured]
    if isinstance(configured, Mapping):
        return optimizers_in(configured.get("optimizer"))
    if isinstance(configured, (list, tuple)):
        if configured and isinstance(configured[0], (list, tuple)):
            configured = configured[0]  # optimizers and schedulers
        return [optimizer for entry in configured for optimizer in optimizers_in(entry)]
    return []
