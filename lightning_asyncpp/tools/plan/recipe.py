"""Recipe of ``asyncpp fit`` for a plan: a module with fake tensors (without data), settings, and a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

import lightning as L
import torch
from jsonargparse import ArgumentParser
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.optim import Optimizer

from lightning_asyncpp.adapt import problems_of_layers
from lightning_asyncpp.core.cut.network import name_in_steps, network_in
from lightning_asyncpp.core.cut.stage import Stage
from lightning_asyncpp.core.cut.units import has_layers
from lightning_asyncpp.core.microbatch import number_of_samples
from lightning_asyncpp.core.settings import PipelineSettings
from lightning_asyncpp.core.stage_optimizer import StageOptimizer, name_parameters
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.lightning_cli.recipe_parser import instantiated
from lightning_asyncpp.tools.plan.fake_tensors import drop_memory
from lightning_asyncpp.trainer.base import PipelineStrategy
from lightning_asyncpp.trainer.set_up import module_problems, optimizers_in


@dataclass
class Recipe:
    """Recipe to plan."""

    module: LightningModule  # with fake tensors, connected to the trainer
    model: nn.Module  # the module's network, which a pipeline cuts
    trainer: L.Trainer  # stand-in for the recipe's Trainer; it runs nothing
    settings: PipelineSettings
    devices: int  # number of processes on all nodes
    nodes: int
    per_node: int  # number of devices of a node
    batch: Any  # on the host, in the loader's structure

    @property
    def batch_size(self) -> int:
        """Number of samples of a batch."""
        return number_of_samples(self.batch)

    def step(self) -> Callable[[Any, float | None], Any]:
        """Return the user's training step as a function of a microbatch and its weight; the weight is unused."""
        step = self.module.training_step
        index = (0,) if is_param_in_hook_signature(step, "batch_idx", min_args=2) else ()
        return lambda microbatch, weight: step(microbatch, *index)

    def optimizer_of(self, stage: Stage) -> Optimizer:
        """Make the optimizer of the whole module, and reduce it to the parameters of a stage."""
        (optimizer,) = optimizers_in(self.module.configure_optimizers())
        name_parameters(optimizer, {p: name for name, p in self.module.named_parameters()})
        StageOptimizer(optimizer, stage.parameters.values()).keep_own()
        return optimizer


def build(config: Mapping[str, Any], devices: int | None = None) -> Recipe:
    """Build a recipe with fake tensors.

    Args:
        config: parsed configuration of ``asyncpp fit``.
        devices: number of processes; default: the recipe's.

    Raises:
        ConfigurationError: the strategy is not a pipeline, the number of devices is unknown, or no cut is possible.
        ValueError: a class refuses its arguments.
    """
    settings = _settings(config["trainer"].get("strategy"))
    given, nodes = config["trainer"].get("devices"), int(config["trainer"].get("num_nodes") or 1)
    per_node = len(given) if isinstance(given, list) else int(given) if str(given).isdigit() else 0
    devices = devices or nodes * per_node
    if not devices:
        raise ConfigurationError(f"trainer.devices={given!r} depends on the machine; give a number with --devices")
    trainer = _trainer(config["trainer"])
    module, model = _module(config["model"], trainer)
    data = _instance(LightningDataModule, "data", config["data"]) if config.get("data") else None
    module = trainer.precision_plugin.convert_module(module)  # type: ignore[assignment]
    drop_memory(module)
    for name in ("log", "log_dict"):
        setattr(module, name, lambda *_, **__: None)
    per_node, batch = per_node or -(-devices // nodes), _example_batch(module, data)
    return Recipe(module, model, trainer, settings, devices, nodes, per_node, batch)


def _settings(strategy: Any) -> PipelineSettings:
    """Return the settings of the recipe's strategy, which must be a pipeline."""
    given = strategy if isinstance(strategy, dict) else {"class_path": strategy}
    name = given["class_path"]
    kind: Any = resolve_name(name) if isinstance(name, str) and "." in name else None
    if not (isinstance(kind, type) and issubclass(kind, PipelineStrategy)):
        raise ConfigurationError(
            f"trainer.strategy={name!r} is not a pipeline; use --trainer.strategy async_pipeline or sync_pipeline"
        )
    made: PipelineStrategy = kind(**(given.get("init_args") or {}))
    return made.session.settings


def _trainer(config: Mapping[str, Any]) -> L.Trainer:
    """Return a Trainer with the recipe's arguments that affect memory."""
    steps = config.get("max_steps") or -1
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        plugins=[LightningEnvironment()],  # starts no processes, even in a Slurm job
        precision=config.get("precision"),
        max_steps=steps if steps > 0 else 1000,  # for schedules of the learning rate; memory does not depend on it
        accumulate_grad_batches=config.get("accumulate_grad_batches") or 1,
        logger=False,
    )
    trainer.strategy.materializes_stages = True  # type: ignore[attr-defined]  # leaves layers on the meta device
    return trainer


def _module(config: Mapping[str, Any], trainer: L.Trainer) -> tuple[LightningModule, nn.Module]:
    """Return the recipe's module and network, on the meta device unless building them reads values of tensors."""
    try:
        with torch.device("meta"):
            module = _built(config, trainer)
        is_ready = has_layers(network_in(module))  # type: ignore[arg-type]
    except Exception:  # an error of the recipe itself occurs again below
        is_ready = False
    if not is_ready:
        module = _built(config, trainer)
    if problems := module_problems(module):
        raise ConfigurationError.from_problems(problems)
    network = network_in(module)
    assert network is not None, "module_problems() refuses a module without one"
    if problems := problems_of_layers(network, module.example_input_array, name_in_steps(module)):
        raise ConfigurationError.from_problems(problems)
    return module, network


def _built(config: Mapping[str, Any], trainer: L.Trainer) -> LightningModule:
    arguments = dict(config.get("init_args") or {})
    if "compile_blocks" in arguments:
        arguments["compile_blocks"] = False  # nothing is computed
    with torch.random.fork_rng(devices=[]):
        module: LightningModule = _instance(LightningModule, "model", {**config, "init_args": arguments})
        module.trainer = trainer
        module.configure_model()
    return module


def _instance(kind: type, key: str, value: Mapping[str, Any]) -> Any:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(kind, key)
    return instantiated(parser, key, value)


def _example_batch(module: LightningModule, data: LightningDataModule | None) -> Any:
    """Return ``example_batch()`` of the data or the module; if they have none, the first training batch."""
    for owner in (data, module):
        if callable(example := getattr(owner, "example_batch", None)):
            return example()
    if data is None:
        return next(iter(module.train_dataloader()))
    data.trainer = module.trainer
    data.prepare_data()
    data.setup("fit")
    return next(iter(data.train_dataloader()))
