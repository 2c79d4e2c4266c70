"""What can be known to be wrong before processes start: names, devices, data, and more stages than layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import lightning as L
import torch
from jsonargparse import Namespace
from lightning.pytorch.strategies import StrategyRegistry
from torch import nn

from lightning_asyncpp.core.cut.network import network_in
from lightning_asyncpp.core.cut.partition import check_given, uniform
from lightning_asyncpp.core.cut.units import has_parameters, pipeline_units
from lightning_asyncpp.core.settings import PipelineSettings, problems_of_partition
from lightning_asyncpp.data import DataError, TextDataModule
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.lightning_cli.nearest import advice
from lightning_asyncpp.models import GPT
from lightning_asyncpp.trainer import GPTModule
from lightning_asyncpp.trainer.base import PipelineStrategy
from lightning_asyncpp.trainer.refusals import trainer_problems

_LARGEST_SEED = 2**32 - 1


def check_values(configuration: Namespace) -> None:
    """Refuse values that are of the right type, and none that can be.

    Args:
        configuration: what was read, of a subcommand or alone.

    Raises:
        ConfigurationError: there are some.
    """
    section = configuration.get(configuration.get("subcommand") or "") or configuration
    strategy, seed = (section.get("trainer") or {}).get("strategy"), section.get("seed_everything")
    if problems := [*_problems_of_strategy(strategy), *_problems_of_seed(seed)]:
        raise ConfigurationError.from_problems(problems)


def _problems_of_strategy(name: Any) -> Iterator[str]:
    """Whether it is a name that nobody registered; with the nearest."""
    known = ["auto", *StrategyRegistry.available_strategies()]
    if isinstance(name, str) and name not in known:
        near = advice(name, known) or f"; there are {', '.join(known)}"
        yield f"--trainer.strategy: there is no strategy {name!r}{near}"


def _problems_of_seed(seed: Any) -> Iterator[str]:
    """Whether Lightning would end with a traceback."""
    if type(seed) is int and not 0 <= seed <= _LARGEST_SEED:
        yield f"--seed_everything: a seed is a whole number from 0 to {_LARGEST_SEED}, got {seed}"


def refused_by_trainer(error: Exception, trainer: Mapping[str, Any]) -> ConfigurationError:
    """Lightning's refusal of the Trainer's arguments in a line; of devices, with what would work.

    Args:
        error: the refusal.
        trainer: the section of the recipe.
    """
    said = " ".join(str(error).split())
    found = torch.cuda.device_count()
    if trainer.get("accelerator") in ("gpu", "cuda") and (not found or "gpu" in said.lower()):
        asked = f"accelerator={trainer.get('accelerator')!r} and devices={trainer.get('devices')!r}"
        mend = f"give --trainer.devices {found}, or" if found else "give"
        return ConfigurationError(
            f"the recipe has {asked}, and torch {torch.__version__} finds {found} GPUs on this machine: {mend}"
            " --trainer.accelerator cpu"
        )
    return ConfigurationError(f"the Trainer refuses its arguments: {said}")


def check_start(trainer: L.Trainer, module: L.LightningModule, data: L.LightningDataModule | None) -> None:
    """Refuse what every process that is to be started would refuse, with all that is wrong.

    Raises:
        ConfigurationError: the data are not there, or strategy, number of devices and layers do not fit together.
    """
    problems = []
    if isinstance(data, TextDataModule):
        try:
            data.check_source()
        except DataError as error:
            problems.append(str(error))
    if isinstance(strategy := trainer.strategy, PipelineStrategy):
        settings, world_size = strategy.session.settings, trainer.num_nodes * trainer.num_devices
        problems += trainer_problems(trainer, settings.weight_dtype)
        problems += settings.resolve(world_size)[1]
        problems += _problems_of_cut(settings, world_size, _model_of(module))
    if problems:
        raise ConfigurationError.from_problems(problems)


def _problems_of_cut(settings: PipelineSettings, world_size: int, model: nn.Module | None) -> list[str]:
    """What is wrong with the number of stages, or the layers of each, for a model whose layers are known."""
    if model is None or settings.data_parallel_size < 1 or world_size % settings.data_parallel_size:
        return []  # how many stages there will be is not known
    num_stages = world_size // settings.data_parallel_size
    if num_stages == 1 or problems_of_partition(settings.partition, num_stages):
        return []
    trained = [has_parameters(unit) for unit in pipeline_units(model)]
    try:
        if isinstance(settings.partition, str):
            uniform(trained, num_stages)
        else:
            check_given(settings.partition, trained)
    except ConfigurationError as error:
        return list(error.problems)
    return []


def _model_of(module: L.LightningModule) -> nn.Module | None:
    """What will be cut, without memory; None where only the module knows how it is made, or it cannot be cut."""
    model = network_in(module)
    if isinstance(model, nn.Sequential) or callable(getattr(model, "pipeline_layers", None)):
        return model
    if isinstance(module, GPTModule) and type(module).build_model is GPTModule.build_model:
        with torch.device("meta"):
            return GPT(module.config)
    return None


def processes_of(trainer: L.Trainer) -> str:
    """How many processes a Trainer runs on, and under which strategy."""
    count, kind = trainer.num_nodes * trainer.num_devices, type(trainer.strategy).__name__
    device = type(trainer.accelerator).__name__.removesuffix("Accelerator")
    return f"{count} {'process' if count == 1 else 'processes'} ({kind}, {device})"
