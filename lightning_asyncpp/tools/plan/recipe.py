"""A recipe of ``asyncpp fit`` as a plan needs it: its module on the meta device, its pipeline's settings, a batch."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

import lightning as L
import torch
from jsonargparse import ArgumentParser
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.optim import Optimizer

from lightning_asyncpp.adapt import problems_of_adapting
from lightning_asyncpp.core.batches.micro_batch import number_of_samples
from lightning_asyncpp.core.cut.network import name_in_steps, network_in
from lightning_asyncpp.core.cut.units import has_layers
from lightning_asyncpp.core.settings import PipelineSettings
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.lightning_cli.recipe_parser import instantiated
from lightning_asyncpp.trainer.base import PipelineStrategy
from lightning_asyncpp.trainer.module_facts import optimizers_in
from lightning_asyncpp.trainer.pipeline_module import PipelineModule

_STEPS = 1000
"""Length of a run whose recipe gives none in updates: schedules of the learning rate need one, memory does not."""


@dataclass
class Recipe:
    """What is planned."""

    config: dict[str, Any]  # as parsed, with all defaults
    module: LightningModule  # on the meta device, connected to the trainer
    trainer: L.Trainer  # stands for the recipe's; nothing runs in it
    settings: PipelineSettings
    devices: int  # processes, on all nodes
    nodes: int
    per_node: int | None  # devices; None where the recipe leaves that to the machine
    batch: Any  # on the host, in the structure that the loader gives
    notes: list[str]  # what was taken for granted

    @property
    def model(self) -> nn.Module:
        """What is cut."""
        model = network_in(self.module)
        assert model is not None
        return model

    @property
    def batch_size(self) -> int:
        """Samples of a batch."""
        return number_of_samples(self.batch)

    @property
    def accumulated(self) -> int:
        """Batches per update."""
        return int(self.trainer.accumulate_grad_batches)

    def argument(self, name: str) -> Any:
        """Return an argument of the module; None if it has none of that name."""
        return (self.config["model"].get("init_args") or {}).get(name)

    def with_argument(self, name: str, value: Any) -> Recipe:
        """Return the same recipe with another argument of the module."""
        model = self.config["model"]
        model = {**model, "init_args": {**model["init_args"], name: value}}
        return build({**self.config, "model": model}, self.devices)

    def make_optimizer(self) -> Optimizer:
        """Make the optimizer of what ``module`` holds now."""
        with quiet():
            (optimizer,) = optimizers_in(self.module.configure_optimizers())
        return optimizer


def build(config: Mapping[str, Any], devices: int | None = None) -> Recipe:
    """Build what a recipe describes, without memory.

    Args:
        config: of ``asyncpp fit``, parsed.
        devices: processes, in place of the recipe's.

    Raises:
        ConfigurationError: it is none of a pipeline, or does not say how many devices there are.
        ValueError: a class refuses its arguments.
    """
    config = dict(copy.deepcopy(config))
    trainer_config = config["trainer"]
    notes: list[str] = []
    settings = _settings(trainer_config.get("strategy"))
    given = trainer_config.get("devices")
    per_node = len(given) if isinstance(given, list) else int(given) if str(given).isdigit() else None
    nodes = int(trainer_config.get("num_nodes") or 1)
    if devices is None and per_node is None:
        raise ConfigurationError(f"trainer.devices={given!r} depends on the machine: give the number with --devices")
    with quiet():
        trainer = _trainer(trainer_config)
        module = _module(config["model"], trainer, notes)
        data = _instance(LightningDataModule, "data", config["data"]) if config.get("data") else None
        module = trainer.precision_plugin.convert_module(module)  # type: ignore[assignment]
        for name in ("log", "log_dict"):
            setattr(module, name, lambda *_, **__: None)
        batch = _example_batch(module, data, notes)
    return Recipe(config, module, trainer, settings, devices or nodes * (per_node or 0), nodes, per_node, batch, notes)


def _settings(strategy: Any) -> PipelineSettings:
    """Return the settings of the recipe's strategy, which must be a pipeline."""
    given = strategy if isinstance(strategy, dict) else {"class_path": strategy}
    name = given["class_path"]
    kind: Any = resolve_name(name) if isinstance(name, str) and "." in name else None
    if not (isinstance(kind, type) and issubclass(kind, PipelineStrategy)):
        raise ConfigurationError(
            f"trainer.strategy={name!r} is no pipeline: give --trainer.strategy async_pipeline, or sync_pipeline"
        )
    with quiet():
        made: PipelineStrategy = kind(**(given.get("init_args") or {}))
    return made.session.settings


def _trainer(config: Mapping[str, Any]) -> L.Trainer:
    """Return a Trainer with all of the recipe's that decides on memory."""
    steps = config.get("max_steps") or -1
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        plugins=[LightningEnvironment()],  # nothing is started, also in a job of Slurm
        precision=config.get("precision"),
        max_steps=steps if steps > 0 else _STEPS,
        accumulate_grad_batches=config.get("accumulate_grad_batches") or 1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _module(config: Mapping[str, Any], trainer: L.Trainer, notes: list[str]) -> LightningModule:
    """Return the recipe's module, on the meta device unless it looks at values while it is built."""
    arguments = dict(config.get("init_args") or {})
    if "compile_blocks" in arguments:
        arguments["compile_blocks"] = False  # there is nothing to run fast

    def built(device: AbstractContextManager[Any]) -> LightningModule:
        with torch.random.fork_rng(devices=[]), device:
            module: LightningModule = _instance(LightningModule, "model", {**config, "init_args": arguments})
            module.trainer = trainer
            if isinstance(module, PipelineModule) and type(module).configure_model is PipelineModule.configure_model:
                with torch.device("meta"):  # configure_model would give it memory under this Trainer
                    module.model = module.model or module.build_model()
            else:
                module.configure_model()
        return module

    try:
        module = built(torch.device("meta"))
        if (network := network_in(module)) is not None and has_layers(network):
            return module
        why = "the model is run to find its layers"
    except Exception:
        why = "the module could not be built on the meta device"
    module = built(nullcontext())  # what is wrong with the recipe shows once more, as a training would see it
    notes.append(f"{why}, so its weights took memory here")
    if network := network_in(module):
        problems = problems_of_adapting(network, module.example_input_array, name_in_steps(module))
        if problems:
            raise ConfigurationError.from_problems(problems)
    return module


def _instance(kind: type, key: str, value: Mapping[str, Any]) -> Any:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(kind, key)
    return instantiated(parser, key, value)


def _example_batch(module: LightningModule, data: LightningDataModule | None, notes: list[str]) -> Any:
    """Return what the data or the module says a batch looks like, or else the first one."""
    for owner in (data, module):
        if callable(example := getattr(owner, "example_batch", None)):
            return example()
    notes.append("the first training batch was loaded, to see its shape; example_batch() of the data spares that")
    source: Any = module
    if data is not None:
        source = data
        data.trainer = module.trainer
        data.prepare_data()
        data.setup("fit")
    return next(iter(source.train_dataloader()))


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out remarks on the devices of this machine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
