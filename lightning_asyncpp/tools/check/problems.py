"""Everything that keeps a pipeline from training a model, found before it trains, all at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_asyncpp.adapt import problems_of_adapting
from lightning_asyncpp.core.cut.materialize import materialize
from lightning_asyncpp.core.cut.network import no_network
from lightning_asyncpp.core.cut.partition_choice import choose_partition
from lightning_asyncpp.core.cut.units import (
    Unit,
    collective_problems,
    meta_problems,
    model_problems,
    ownership_problems,
    pipeline_units,
)
from lightning_asyncpp.core.cut.whole_model import WholeModel
from lightning_asyncpp.core.settings import PipelineSettings, is_whole
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.tools.check.trainer_stand_in import give_trainer
from lightning_asyncpp.tools.check.trial import StepOf, copied, name_of, network_of
from lightning_asyncpp.trainer.module_facts import optimizers_in
from lightning_asyncpp.trainer.refusals import module_problems, optimizer_problem

T = TypeVar("T")


class Problems(list[str]):
    """Collects what is wrong."""

    def attempt(self, function: Callable[[], T]) -> T | None:
        """What it returns; None if it raises ConfigurationError, whose problems are kept."""
        try:
            return function()
        except ConfigurationError as error:
            self.extend(error.problems)
            return None

    def attempt_user_code(self, function: Callable[[], T]) -> T | None:
        """The same; other errors are kept where there are problems already, otherwise they go on as they are."""
        try:
            return self.attempt(function)
        except Exception as error:
            if not self:
                raise
            self.append(f"as the layers were compared with the whole model, {type(error).__name__}: {error}")
            return None

    def raise_any(self) -> None:
        """Raise ConfigurationError with all of them."""
        if self:
            raise ConfigurationError.from_problems(self)


def argument_problems(module: nn.Module, step: StepOf | None, stages: int, updates: int) -> list[str]:
    """What is wrong with what check_model was given."""
    problems = [
        f"{name}={value!r} must be a whole number, 1 or more"
        for name, value in (("stages", stages), ("updates", updates))
        if not is_whole(value) or value < 1
    ]
    if step is None and not hasattr(module, "training_step"):
        problems.append(
            f"{type(module).__name__} has no training_step: give check_model a step, a function (module, micro_batch)"
            " -> loss that calls the model once"
        )
    return problems


def prepare(module: nn.Module, settings: PipelineSettings, stages: int, seed: int, found: Problems) -> nn.Module:
    """A copy of the module with real weights, in training mode; problems with it are added to ``found``."""
    prototype = copied(module)
    # A copy knows nothing of having been compiled; but only the copy may have its model.
    original: Any = module if isinstance(network_of(module), nn.Module) else prototype
    network = network_of(prototype)
    name = name_of(network, prototype)
    if isinstance(module, LightningModule):
        found += module_problems(original)
    elif isinstance(network, nn.Module):
        found += model_problems(network_of(original), name)
    else:
        found.append(no_network(module))
    example = getattr(prototype, "example_input_array", None)
    if isinstance(network, nn.Module) and (uncuttable := problems_of_adapting(network, example, name)):
        found += uncuttable
        return prototype.train()
    if not isinstance(network, nn.Module) or (units := found.attempt(lambda: pipeline_units(network))) is None:
        return prototype.train()
    wrong = ownership_problems(prototype, units, name) + meta_problems(prototype, units) + collective_problems(units)
    found += wrong
    if model_problems(network, name):
        return prototype.train()
    _check_partition(network, units, settings, stages, found)
    if not wrong:
        found.attempt(lambda: materialize(units, range(len(units)), seed, torch.device("cpu")))
    return prototype.train()


def _check_partition(
    network: nn.Module, units: Sequence[Unit], settings: PipelineSettings, stages: int, found: Problems
) -> None:
    if stages < 1 or settings.resolve(stages)[0] is None:
        return
    partition = found.attempt(lambda: choose_partition(network, 0, stages, settings.partition))
    if partition is not None:
        found += WholeModel.of(units, partition.counts)[1]


def can_run(prototype: nn.Module) -> bool:
    """Whether its layers can be applied at all."""
    network = network_of(prototype)
    try:
        return isinstance(network, nn.Module) and bool(pipeline_units(network)) and not model_problems(network)
    except ConfigurationError:
        return False


def configured_problems(module: nn.Module) -> tuple[list[str], str]:
    """What is wrong with the optimizer that a LightningModule makes, and why that cannot be said, where it cannot.

    One that asks for its Trainer gets a stand-in, which knows how long the training is.

    Args:
        module: the whole one.
    """
    if not isinstance(module, LightningModule) or not is_overridden("configure_optimizers", module):
        return [], ""
    module = copy.deepcopy(module)
    give_trainer(module)
    try:
        problem = optimizer_problem(optimizers_in(module.configure_optimizers()))
    except Exception as error:  # it may ask its Trainer for more than the stand-in has
        return [], f"configure_optimizers raised {type(error).__name__}: {error}"
    return [problem] if problem else [], ""
