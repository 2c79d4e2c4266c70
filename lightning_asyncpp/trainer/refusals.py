"""Configurations of a Trainer that cannot be run right, each with the mend; all are found before training starts."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

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
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer

from lightning_asyncpp.core.batches.user_hooks import problems_of_reduction
from lightning_asyncpp.core.cut.network import name_in_steps, network_in, no_network
from lightning_asyncpp.core.cut.units import model_problems
from lightning_asyncpp.core.cut.whole_model import whole_of
from lightning_asyncpp.core.settings import problems_of_precision, problems_of_weight_dtype
from lightning_asyncpp.trainer import private

ONE_OPTIMIZER = (
    "configure_optimizers returned more than one optimizer (multiple optimizers): a pipeline has exactly one update per"
    " mini-batch; use one optimizer with parameter groups (MuonAdamW splits its parameters by itself)"
)
NOTHING_TO_STEP = (
    "optimizer.step() came without a gradient: no closure has run since the step before; a pipeline applies every"
    " gradient once, so call optimizer.step(closure=optimizer_closure), or the closure first"
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
    """What the Trainer's arguments and callbacks ask for that a pipeline cannot do."""
    problems = problems_of_weight_dtype(weight_dtype, str(trainer.precision)) + problems_of_precision(trainer.precision)
    if private.has_timed_validation(trainer):
        problems.append(
            "val_check_interval is a time: every rank would decide by its own clock; give a number of batches"
        )
    if private.synchronizes_batch_norm(trainer):
        problems.append(
            "sync_batchnorm=True: BatchNorm would synchronise over all ranks, most of which hold other layers; leave it"
            " out, statistics are then those of each micro-batch, or normalise without them (GroupNorm)"
        )
    if trainer.accumulate_grad_batches < 1:
        problems.append(f"accumulate_grad_batches={trainer.accumulate_grad_batches} must be at least 1")
    if (trainer.gradient_clip_val or 0.0) < 0.0:
        problems.append(
            f"gradient_clip_val={trainer.gradient_clip_val} is below 0: it would turn every gradient around; 0 or None"
            " clips nothing"
        )
    if weight_dtype is not None and any(isinstance(c, WeightAveraging) for c in trainer.callbacks):  # type: ignore[attr-defined]
        problems.append(
            f"weight_dtype={weight_dtype!r} with a callback that averages weights: it would read and swap the masters,"
            " and not the weights that are validated; leave weight_dtype out"
        )
    return problems + _callback_problems(trainer)


def module_problems(module: LightningModule, trainer: L.Trainer | None = None) -> list[str]:
    """What the LightningModule does that a pipeline cannot follow; without a Trainer, in training."""
    is_trained = trainer is None or trainer.state.fn == TrainerFn.FITTING
    problems = []
    if not module.automatic_optimization:
        problems.append(
            "automatic_optimization=False: with manual optimization the module decides when to step, but an update"
            " comes one batch after its gradient; use automatic optimization"
        )
    problems += backward_problems(module)
    if private.is_compiled(module):
        problems.append(
            f"{type(module).__name__} was compiled as a whole (torch.compile), but its steps run to their end on the"
            f" last stage alone: compile the layers of {name_in_steps(module)} instead (layer.compile() for each)"
        )
    network, name = network_in(module), name_in_steps(module)
    if network is None:
        problems.append(no_network(module))
    else:
        problems += model_problems(network, name)
        if is_trained:
            problems += frozen_problems(network, name)
    if is_trained and "dataloader_iter" in inspect.signature(module.training_step).parameters:
        problems.append("training_step(dataloader_iter) is not supported: the pipeline cuts batches; take a batch")
    return problems + problems_of_reduction(getattr(module, "loss_reduction", "mean"))


def frozen_problems(network: nn.Module, name: str = "self.model") -> list[str]:
    """Whether nothing of a whole model is to be trained; a stage of one that was cut before may train nothing."""
    trained = [parameter.requires_grad for parameter in network.parameters()]
    if whole_of(network) is not None or not trained or any(trained):
        return []
    return [
        f"no parameter of {name} requires a gradient: all of it is frozen and there is nothing to train; call"
        " requires_grad_(True) on what is to be trained"
    ]


def backward_problems(module: LightningModule) -> list[str]:
    """What a module does in a backward of its own, which nobody would call."""
    if not is_overridden("backward", module):
        return []
    return [
        f"{type(module).__name__} has a backward() of its own, which is not called: backwards run micro-batch by"
        " micro-batch, from the loss that training_step returns; put what it does into that loss, or into"
        " on_before_optimizer_step"
    ]


def without_gradients(module: LightningModule, callbacks: Sequence[L.Callback]) -> list[str]:
    """Who has an ``on_after_backward``, which finds no gradients."""
    owners: list[LightningModule | L.Callback] = [module, *callbacks]
    return [
        type(owner).__name__
        for owner, base in ((o, LightningModule if o is module else L.Callback) for o in owners)
        if is_overridden("on_after_backward", owner, base)
    ]


def optimizer_problem(optimizers: Sequence[Optimizer]) -> str:
    """Why one update per mini-batch cannot use what configure_optimizers returned; empty if it can."""
    if len(optimizers) > 1:
        return ONE_OPTIMIZER
    if not optimizers or not any(group["params"] for group in optimizers[0].param_groups):
        return (
            "configure_optimizers returned no optimizer: a pipeline trains with exactly one. Return one over"
            " self.parameters() or self.named_parameters()"
        )
    return ""


def _callback_problems(trainer: L.Trainer) -> list[str]:
    problems = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for refused, reason in _CALLBACKS:
            if isinstance(callback, refused):
                problems.append(f"{type(callback).__name__} cannot work under a pipeline: {reason}; leave it out")
                break
    return problems
