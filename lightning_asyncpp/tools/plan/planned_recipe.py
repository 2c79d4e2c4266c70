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
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_asyncpp.adapt import problems_of_adapting
from lightning_asyncpp.core.batches.micro_batch import number_of_samples
from lightning_asyncpp.core.batches.tree import map_tensors
from lightning_asyncpp.core.cut.network import name_in_steps, network_in
from lightning_asyncpp.core.cut.units import has_layers, model_problems
from lightning_asyncpp.core.settings import PipelineSettings, problems_of_precision
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.lightning_cli.recipe_parser import instantiated
from lightning_asyncpp.trainer.base import PipelineStrategy
from lightning_asyncpp.trainer.module_facts import optimizers_in
from lightning_asyncpp.trainer.pipeline_module import PipelineModule
from lightning_asyncpp.trainer.refusals import module_problems, optimizer_problem, trainer_problems

_STEPS = 1000
"""Length of a run whose recipe gives none in updates: schedules of the learning rate need one, memory does not."""


@dataclass
class Recipe:
    """What is planned.

    Attributes:
        config: as parsed, with all defaults.
        module: on the meta device, connected to ``trainer``.
        trainer: stands for the recipe's; nothing runs in it.
        settings: of the pipeline.
        devices: processes, on all nodes.
        nodes: number of machines.
        per_node: devices of each as the recipe has it; None where it leaves that to the machine.
        batch: on the host, in the structure that the loader gives.
        batch_size: samples of it.
        notes: what was taken for granted.
    """

    config: dict[str, Any]
    module: LightningModule
    trainer: L.Trainer
    settings: PipelineSettings
    devices: int
    nodes: int
    per_node: int | None
    batch: Any
    batch_size: int
    notes: list[str]

    @property
    def model(self) -> nn.Module:
        """What is cut."""
        model = network_in(self.module)
        assert model is not None
        return model

    @property
    def accumulated(self) -> int:
        """Batches per update."""
        return int(self.trainer.accumulate_grad_batches)

    def argument(self, name: str) -> Any:
        """An argument of the module; None if it has none of that name."""
        return (self.config["model"].get("init_args") or {}).get(name)

    def with_argument(self, name: str, value: Any) -> Recipe:
        """The same recipe with another argument of the module."""
        model = self.config["model"]
        model = {**model, "init_args": {**model["init_args"], name: value}}
        return build({**self.config, "model": model}, self.devices)

    def make_optimizer(self) -> Optimizer:
        """The optimizer of what ``module`` holds now."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizers = optimizers_in(self.module.configure_optimizers())
        if problem := optimizer_problem(optimizers):
            raise ConfigurationError(problem)
        return optimizers[0]


def build(config: Mapping[str, Any], devices: int | None = None) -> Recipe:
    """Build what a recipe describes, without memory.

    Args:
        config: of ``asyncpp fit``, parsed.
        devices: processes, in place of the recipe's.

    Raises:
        ConfigurationError: it cannot be trained by a pipeline; all problems that can be known together.
        ValueError: a class refuses its arguments.
    """
    config = dict(copy.deepcopy(config))
    trainer_config = config["trainer"]
    settings = _settings(trainer_config.get("strategy"))
    nodes, per_node = int(trainer_config.get("num_nodes") or 1), _devices_of(trainer_config)
    if devices is None and per_node is None:
        given = trainer_config.get("devices")
        raise ConfigurationError(f"trainer.devices={given!r} depends on the machine: give the number with --devices")
    notes: list[str] = []
    with quiet():
        trainer = _trainer(trainer_config, notes)
        module = _module_of(config["model"], trainer, notes)
        data = _instance(LightningDataModule, "data", config["data"]) if config.get("data") else None
        problems = [*trainer_problems(trainer, settings.weight_dtype), *module_problems(module, trainer)]
        if problems:
            raise ConfigurationError.from_problems(problems)
        module = trainer.precision_plugin.convert_module(module)  # type: ignore[assignment]
    _silence_logs(module)
    batch = _example_batch(module, data, notes)
    count = devices or nodes * (per_node or 0)
    samples = number_of_samples(batch)
    return Recipe(dict(config), module, trainer, settings, count, nodes, per_node, batch, samples, notes)


def resized(batch: Any, old: int, new: int) -> Any:
    """A batch with another number of samples: every tensor whose first dimension is ``old`` gets ``new``.

    All of them share the memory of one: a search tries batches that would not fit this machine.
    """

    def resize(tensor: Tensor) -> Tensor:
        if tensor.ndim == 0 or tensor.shape[0] != old:
            return tensor
        return tensor[:1].expand(new, *tensor.shape[1:])

    return batch if new == old else map_tensors(resize, batch)


def _settings(strategy: Any) -> PipelineSettings:
    """The settings of the recipe's strategy, which must be a pipeline."""
    name = strategy if isinstance(strategy, str) or strategy is None else strategy.get("class_path")
    arguments = {} if name is strategy else dict(strategy.get("init_args") or {})
    kind: Any = None
    if name in StrategyRegistry:
        kind, arguments = StrategyRegistry[name]["strategy"], dict(StrategyRegistry[name]["init_params"])
    elif isinstance(name, str) and "." in name:
        kind = resolve_name(name)
    if not (isinstance(kind, type) and issubclass(kind, PipelineStrategy)):
        raise ConfigurationError(
            f"trainer.strategy={name!r} is no pipeline: give --trainer.strategy async_pipeline, or sync_pipeline"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: PipelineStrategy = kind(**arguments)
    return made.session.settings


def _trainer(config: Mapping[str, Any], notes: list[str]) -> L.Trainer:
    """A Trainer with all of the recipe's that decides on memory, or that a pipeline may refuse."""
    precision = config.get("precision")
    if str(precision).startswith("16"):  # on the CPU, where this runs, Lightning takes it for another one
        raise ConfigurationError.from_problems(problems_of_precision("16-mixed"))
    if config.get("plugins"):
        notes.append("trainer.plugins are left out")
    steps = config.get("max_steps", -1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        plugins=[LightningEnvironment()],  # nothing is started, also in a job of Slurm
        precision=precision,
        max_steps=steps if steps and steps > 0 else _STEPS,
        accumulate_grad_batches=config.get("accumulate_grad_batches") or 1,
        val_check_interval=config.get("val_check_interval"),
        check_val_every_n_epoch=config.get("check_val_every_n_epoch", 1),
        sync_batchnorm=bool(config.get("sync_batchnorm")),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.state.fn = TrainerFn.FITTING
    given = config.get("callbacks") or []
    for callback in given if isinstance(given, list) else [given]:
        kind: Any = resolve_name(callback["class_path"])
        trainer.callbacks.append(kind.__new__(kind))  # type: ignore[attr-defined]  # its class is all that is asked for
    return trainer


def _devices_of(config: Mapping[str, Any]) -> int | None:
    """Devices of a node; None if they depend on the machine."""
    devices = config.get("devices")
    if isinstance(devices, list):
        return len(devices)
    if isinstance(devices, str) and devices.isdigit():
        devices = int(devices)
    return devices if isinstance(devices, int) and devices > 0 else None


def _module_of(config: Mapping[str, Any], trainer: L.Trainer, notes: list[str]) -> LightningModule:
    """The recipe's module, on the meta device unless it looks at values while it is built."""

    def built(device: AbstractContextManager[Any]) -> LightningModule:
        with torch.random.fork_rng(devices=[]), device:
            module: LightningModule = _instance(LightningModule, "model", _uncompiled(config))
            module.trainer = trainer
            if isinstance(module, PipelineModule) and type(module).configure_model is PipelineModule.configure_model:
                with torch.device("meta"):  # configure_model would give it memory under this Trainer
                    module.model = module.model or module.build_model()
            else:
                module.configure_model()
        return module

    try:
        module = built(torch.device("meta"))
        network = network_in(module)
        if network is None or has_layers(network) or model_problems(network):
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


def _uncompiled(model: Mapping[str, Any]) -> dict[str, Any]:
    """The model's class and arguments, without compilation: there is nothing to run fast."""
    arguments = dict(model.get("init_args") or {})
    if "compile_blocks" in arguments:
        arguments["compile_blocks"] = False
    return {**model, "init_args": arguments}


def _silence_logs(module: LightningModule) -> None:
    for name in ("log", "log_dict"):
        setattr(module, name, lambda *_, **__: None)


def _example_batch(module: LightningModule, data: LightningDataModule | None, notes: list[str]) -> Any:
    """A batch on the host: what the data or the module says it looks like, or else the first one."""
    for owner in (data, module):
        if callable(example := getattr(owner, "example_batch", None)):
            return example()
    notes.append("the first training batch was loaded, to see its shape; example_batch() of the data spares that")
    source: Any = data if data is not None else module
    with quiet():
        if data is not None:
            data.trainer = module.trainer
            data.prepare_data()
            data.setup("fit")
        return next(iter(source.train_dataloader()))


@contextmanager
def quiet() -> Iterator[None]:
    """Without Lightning's remarks on the devices of this machine."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loggers, levels):
                logger.setLevel(level)
