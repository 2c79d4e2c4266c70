"""What can be known to be wrong before processes start: names, devices, data, and more stages than layers."""

from __future__ import annotations

import lightning as L
from jsonargparse import Namespace
from lightning.pytorch.strategies import StrategyRegistry

from lightning_asyncpp.data import DataError, TextDataModule
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.lightning_cli.nearest import advice
from lightning_asyncpp.trainer.base import PipelineStrategy
from lightning_asyncpp.trainer.set_up import trainer_problems


def check_values(configuration: Namespace) -> None:
    """Refuse a strategy that nobody registered, with the nearest that somebody did.

    Args:
        configuration: what was read, of a subcommand or alone.

    Raises:
        ConfigurationError: it is one.
    """
    section = configuration.get(configuration.get("subcommand") or "") or configuration
    name, known = (section.get("trainer") or {}).get("strategy"), ["auto", *StrategyRegistry.available_strategies()]
    if isinstance(name, str) and name not in known:
        near = advice(name, known) or f"; there are {', '.join(known)}"
        raise ConfigurationError(f"--trainer.strategy: there is no strategy {name!r}{near}")


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
    if problems:
        raise ConfigurationError.from_problems(problems)


def processes_of(trainer: L.Trainer) -> str:
    """How many processes a Trainer runs on, and under which strategy."""
    count, kind = trainer.num_nodes * trainer.num_devices, type(trainer.strategy).__name__
    device = type(trainer.accelerator).__name__.removesuffix("Accelerator")
    return f"{count} {'process' if count == 1 else 'processes'} ({kind}, {device})"
