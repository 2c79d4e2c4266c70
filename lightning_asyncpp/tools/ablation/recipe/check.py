"""Checks the trainings of an ablation before any is started: by the parser of `asyncpp fit`, and by building a part."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import pkgutil
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from torch import nn
from torch.optim import Optimizer

from lightning_asyncpp import cli
from lightning_asyncpp.core.emulator.gradient_delay import DelaySettings
from lightning_asyncpp.lightning_cli.recipe_parser import instantiated
from lightning_asyncpp.tools.ablation.recipe.cell_config import strategy_config, training_config, with_places
from lightning_asyncpp.tools.ablation.recipe.recipe import (
    ALONE,
    BASE,
    ClassConfig,
    Correction,
    OptimizerGrid,
    Recipe,
    Variant,
)
from lightning_asyncpp.tools.ablation.recipe.yaml_files import write_yaml

# Lines of the parser's messages that repeat the value or the annotation instead of saying what is wrong.
_REMARK = re.compile(
    r"Does not validate against any of|Subtypes:|Errors:|Expected a <class 'NoneType'>|Given value|"
    r"Problem with given class_path .*:$"
)

Parse = Callable[[dict[str, Any], Recipe], str | None]

_NO_MODULE = "; modules of your own are found in the folder that the command is called in, and on PYTHONPATH"
_NO_OPTIMIZER = (
    "its module takes no optimizer: give its __init__ an argument `optimizer: OptimizerCallable` (from"
    " lightning.pytorch.cli), and let configure_optimizers return self.optimizer(self.named_parameters())"
)


def find_problems(recipe: Recipe) -> list[str]:
    """Check the base recipe, and on it every optimizer, correction and delay with the parser and the strategy."""
    base = training_config(recipe, recipe.seeds[0], "auto", None)
    if message := _parse(base, recipe):
        # The parser would say the same of everything that is put into this recipe.
        problems, parse, names = [_base_problem(recipe, message)], _accept, []
    else:
        problems, parse, names = list(_variant_problems(recipe)), _parse, _parameter_names(recipe)
    return [*problems, *_optimizer_problems(recipe, parse), *_delay_problems(recipe, parse, names)]


def _variant_problems(recipe: Recipe) -> Iterator[str]:
    for variant in recipe.variants:
        message = variant.places and _parse(training_config(recipe, recipe.seeds[0], "auto", None, variant), recipe)
        if message:
            yield f"variants.{variant.name}: {message}"


def _base_problem(recipe: Recipe, message: str) -> str:
    """Where the mistake is: in the base recipe, or in what the grid puts into it."""
    if recipe.seed_arguments:
        alone = dataclasses.replace(recipe, seed_arguments=())
        if _parse(training_config(alone, recipe.seeds[0], "auto", None), alone) is None:
            return f"seed_arguments: {', '.join(recipe.seed_arguments)}: {message}"
    if "'optimizer' is not accepted" in message or "has no argument 'optimizer'" in message:
        message = _NO_OPTIMIZER
    elif "No module named" in message or "there is no module" in message:
        message += _NO_MODULE
    return f"recipe: {recipe.base_path}: {message}"


def _optimizer_problems(recipe: Recipe, parse: Parse) -> Iterator[str]:
    checked: list[Correction] = []
    for correction in (c for grid in recipe.optimizers for c in grid.corrections):
        if correction.config is None or correction in checked:
            continue
        if problem := _class_problem(correction.config):
            checked.append(correction)
            yield f"corrections.{correction.name}: {problem}"
    for grid in recipe.optimizers:
        place = f"optimizers.{grid.name}"
        problem = _class_problem(grid.config) or parse(_with_optimizer(recipe, grid, ALONE), recipe)
        problem = problem or _refusal(grid, ALONE)
        if problem:
            yield f"{place}: {problem}"
            continue
        for correction in grid.corrections:
            if correction.config is None or correction in checked:
                continue
            checked.append(correction)
            problem = parse(_with_optimizer(recipe, grid, correction), recipe)
            problem = problem or _refusal(grid, correction)
            if problem:
                yield f"corrections.{correction.name}, around {grid.name}: {problem}"


def _refusal(grid: OptimizerGrid, correction: Correction) -> str | None:
    momenta = grid.momentum.values if grid.momentum else (None,)
    refusals = (refusal(grid.build(lr, momentum, correction)) for lr in grid.lrs for momentum in momenta)
    return next((message for message in refusals if message), None)


def _with_optimizer(
    recipe: Recipe, grid: OptimizerGrid, correction: Correction, variant: Variant = BASE
) -> dict[str, Any]:
    momentum = grid.momentum.values[0] if grid.momentum else None
    optimizer = grid.build(grid.lrs[0], momentum, correction)
    return training_config(recipe, recipe.seeds[0], "auto", optimizer, variant)


def _parameter_names(recipe: Recipe) -> list[list[str]]:
    """The trained parameters of the module in every variant, where a delay is by stage and they can be told."""
    if not any(delay.stages is not None for delay in recipe.delays):
        return []
    configs = [_with_optimizer(recipe, recipe.optimizers[0], ALONE, variant) for variant in recipe.variants]
    return [names for config in configs if (names := parameter_names(config["model"])) is not None]


def _delay_problems(recipe: Recipe, parse: Parse, names: Sequence[Sequence[str]]) -> Iterator[str]:
    try:
        strategy: Any = pkgutil.resolve_name(recipe.strategy)
    except (ImportError, AttributeError, ValueError) as error:
        yield f"strategy: there is no class {recipe.strategy!r} ({error})"
        return
    for delay in recipe.delays:
        config = strategy_config(recipe, delay)
        message = parse(training_config(recipe, recipe.seeds[0], config, None), recipe)
        message = message or _strategy_problem(strategy, config["init_args"], names)
        if message is not None:
            yield f"delays: {dict(delay.init_args)}: {message}"


def _strategy_problem(strategy: Any, init_args: dict[str, Any], modules: Sequence[Sequence[str]]) -> str | None:
    try:
        settings = getattr(strategy(**init_args), "settings", None)
        if isinstance(settings, DelaySettings):
            for names in modules:
                settings.of_parameters(names)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def _class_problem(config: ClassConfig) -> str | None:
    """Say what is wrong with the name of an optimizer's class; short names are left to the parser."""
    if "." not in config.class_path:
        return None
    try:
        found = pkgutil.resolve_name(config.class_path)
    except (ImportError, AttributeError, ValueError) as error:
        return f"there is no class {config.class_path!r} ({error})"
    if isinstance(found, type) and not issubclass(found, Optimizer):
        return f"{config.class_path} is no torch optimizer"
    return None


def _accept(config: dict[str, Any], recipe: Recipe) -> str | None:
    """A parser that has no complaint."""
    return None


def _parse(config: dict[str, Any], recipe: Recipe) -> str | None:
    """Give a configuration to the parser of ``asyncpp fit`` and return its complaint."""
    arguments, errors = sys.argv, io.StringIO()
    with tempfile.TemporaryDirectory(prefix="asyncpp-ablate-") as name:
        path = Path(name) / "fit.yaml"
        write_yaml(path, with_places(config, recipe, Path(name), "cpu"))
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
                cli.main(["fit", "--config", str(path), "--print_config"])
        except SystemExit as end:
            return _complaint(errors.getvalue(), path) if end.code else None
        finally:
            sys.argv = arguments
    return None


def _complaint(printed: str, path: Path) -> str:
    """What the parser printed, without its usage, its remarks on types and the temporary file's name."""
    text = printed.rpartition("error: ")[2] if "error: " in printed else printed
    lines = [line.strip(" -") for line in text.splitlines()]
    telling = [re.sub(r"\. Got value: .*", "", line) for line in lines if line and not _REMARK.match(line)]
    return " ".join(telling or lines).replace(str(path), "the recipe")


def parameter_names(model: Mapping[str, Any]) -> list[str] | None:
    """Names of the parameters of a module, in their order.

    Args:
        model: the key of that name in a recipe of ``asyncpp fit``; known to be accepted by its parser.

    Returns:
        ``None`` where the module cannot be built outside a training.
    """
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningModule, "model")
    try:
        # Without memory for the weights, as far as the module follows.
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            module: LightningModule = instantiated(parser, "model", model)
            module.configure_model()
    except Exception:  # the user's code; the training will tell what is wrong with it, if anything is
        return None
    return [name for name, _ in module.named_parameters()]


def refusal(optimizer: Mapping[str, Any]) -> str | None:
    """Say what the class of an optimizer has against its values; it is built around a small parameter.

    Args:
        optimizer: class and arguments, as in a recipe of ``asyncpp fit``; known to be accepted by its parser.

    Returns:
        The message of the ``ValueError``; ``None`` if there is none, or if the optimizer cannot be built outside a
        training.
    """
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--optimizer", type=OptimizerCallable)
    try:
        instantiated(parser, "optimizer", optimizer)([("weight", nn.Parameter(torch.zeros(2, 2)))])
    except ValueError as error:
        return str(error)
    except Exception:  # it may want other parameters; the training will tell what is wrong, if anything is
        return None
    return None
