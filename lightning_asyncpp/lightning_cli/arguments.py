"""What stands for other arguments, or goes before them, until LightningCLI reads them; nothing heavy is imported.

Recipes that come with the package go by their names: ``asyncpp fit quickstart``.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.lightning_cli.help import did_you_mean

_LIKE_A_NAME = re.compile(r"[\w./-]*\w")  # --config takes YAML, "-" and URLs, too


def package_recipes() -> dict[str, Path]:
    """Name -> file: ``quickstart`` and so on."""
    package = Path(__file__).parents[1]
    installed, of_checkout = package / "recipes", package.parent / "recipes"
    folder = installed if installed.is_dir() else of_checkout
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.yaml"))}


def package_recipe(name: str) -> Path:
    """The file of a recipe of the package.

    Raises:
        ConfigurationError: there is none of this name.
    """
    recipes = package_recipes()
    if name not in recipes:
        raise ConfigurationError(
            f"there is no recipe {name}, neither a file nor a name{did_you_mean(name, recipes)}"
            " (`asyncpp recipes` lists them)"
        )
    return recipes[name]


def recipe_path(given: str) -> str:
    """The recipe's file, of what a command was given as one.

    Args:
        given: a path, or the name of a recipe of the package, ``quickstart``, which may be written as the documents
            write it, ``recipes/quickstart.yaml``. A file comes before a recipe of its name.

    Returns:
        What was given, where it can be no name: whoever opens it says so.

    Raises:
        ConfigurationError: there is neither such a file nor such a recipe.
    """
    if not _LIKE_A_NAME.fullmatch(given) or (os.path.exists(given) and not os.path.isdir(given)):
        return given
    return str(package_recipe(given.removeprefix("./").removeprefix("recipes/").removesuffix(".yaml")))


STRATEGIES = {
    "async_pipeline": "lightning_asyncpp.AsyncPipelineStrategy",
    "sync_pipeline": "lightning_asyncpp.SyncPipelineStrategy",
    "delayed_gradient": "lightning_asyncpp.DelayedGradientStrategy",
}
"""Name of a strategy for the Trainer -> its class, which takes options where the name alone would not."""
_CLASS_NAME = re.compile(r"(\w+\.)*[A-Z]\w*")
_CONFIG, _STRATEGY, _OPTIMIZER, _TRACE = ("--config", "-c"), "--trainer.strategy", "--optimizer", "--trace"

# Optimizers known by the name of their rule for matrices; torch.optim.Muon takes nothing but matrices, and no model.
_WHOLE_MODEL = {"Muon": "MuonAdamW", "NorMuon": "NorMuonAdamW"}


def find_own_modules() -> None:
    """Let recipes name classes of the folder that the command is called in, as ``python -m`` does.

    It comes last: what is installed stays what it is.
    """
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def written_out(arguments: Sequence[str]) -> list[str]:
    """The arguments of a subcommand of LightningCLI, without this command's shorthands.

    These are recipes by their names and by their place, strategies by their names, ``--optimizer`` for the model's, and
    ``--trace [FOLDER]`` for a ``PipelineTrace`` among the callbacks.

    Raises:
        ConfigurationError: there is no recipe that they name.
    """
    left = list(arguments)
    written: list[str] = []
    trace: list[str] = []
    if left and not left[0].startswith("-"):
        written.append(left.pop(0))
        while left and not left[0].startswith("-"):
            written.append(f"--config={recipe_path(left.pop(0))}")
    while left:
        argument = left.pop(0)
        name, equals, value = argument.partition("=")
        short = name.partition(".")[0]
        if short not in (_OPTIMIZER, _TRACE) and name not in (*_CONFIG, _STRATEGY):
            written.append(argument)
            continue
        if not equals and left and not (name == _TRACE and left[0].startswith("-")):
            value = left.pop(0)
        if short == _TRACE:
            # Last, so that no --config takes the place of the list that it is added to.
            trace = trace or ["--trainer.callbacks+=lightning_asyncpp.PipelineTrace"]
            trace += [f"--trainer.callbacks{name.removeprefix(_TRACE) or '.dirpath'}={value}"] if value else []
        else:
            written.append(_written(name, value))
    return written + trace


def _written(name: str, value: str) -> str:
    if name in _CONFIG:
        return f"--config={recipe_path(value)}"
    if name == _STRATEGY:
        found = class_of_strategy(value)
        return f"{name}={json.dumps({'class_path': found}) if found else value}"
    return f"--model.init_args.{name.removeprefix('--')}={_WHOLE_MODEL.get(value, value)}"


def class_of_strategy(value: str) -> str | None:
    """The class that a strategy's value stands for; ``None`` for a name that only the Trainer knows, and for no name.

    The Trainer takes names without options, and jsonargparse takes any text for such a name.
    """
    return STRATEGIES.get(value) or (value if _CLASS_NAME.fullmatch(value) else None)
