"""Shorthands of the command's arguments, expanded before LightningCLI reads them; cheap to import.

Recipes of the package have names: ``asyncpp fit quickstart``.
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

_LIKE_A_NAME = re.compile(r"[\w./-]*\w")  # --config also accepts YAML, "-" and URLs


def package_recipes() -> dict[str, Path]:
    """Return the files of the package's recipes by their names, such as ``quickstart``."""
    package = Path(__file__).parents[1]
    installed, of_checkout = package / "recipes", package.parent / "recipes"
    folder = installed if installed.is_dir() else of_checkout
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.yaml"))}


def package_recipe(given: str) -> Path:
    """Return the file of a recipe of the package: ``quickstart``, also written ``recipes/quickstart.yaml``.

    Raises:
        ConfigurationError: no recipe has this name.
    """
    name = given.removeprefix("./").removeprefix("recipes/").removesuffix(".yaml")
    recipes = package_recipes()
    if name not in recipes:
        raise ConfigurationError(
            f"there is no recipe {name}, as a file or in the package{did_you_mean(name, recipes)}"
            " (`asyncpp recipes` lists those of the package)"
        )
    return recipes[name]


def recipe_path(given: str) -> str:
    """Return the file of a recipe given by path or name.

    Args:
        given: a path, or the name of a recipe of the package: ``quickstart``, or ``recipes/quickstart.yaml`` as in the
            documentation. A file takes precedence over a recipe of the same name.

    Returns:
        The path; ``given`` itself if it is a file or cannot be a name.

    Raises:
        ConfigurationError: neither a file nor a recipe has this name.
    """
    if not _LIKE_A_NAME.fullmatch(given) or (os.path.exists(given) and not os.path.isdir(given)):
        return given
    return str(package_recipe(given))


STRATEGIES = {
    "async_pipeline": "lightning_asyncpp.AsyncPipelineStrategy",
    "sync_pipeline": "lightning_asyncpp.SyncPipelineStrategy",
    "delayed_gradient": "lightning_asyncpp.DelayedGradientStrategy",
}
"""Name of a strategy in the Trainer -> its class; only classes accept options."""
_CLASS_NAME = re.compile(r"(\w+\.)*[A-Z]\w*")
_CONFIG, _STRATEGY, _OPTIMIZER, _TRACE = ("--config", "-c"), "--trainer.strategy", "--optimizer", "--trace"

# Short name -> optimizer for a whole model; torch.optim.Muon accepts only matrices.
_WHOLE_MODEL = {"Muon": "MuonAdamW", "NorMuon": "NorMuonAdamW"}


def find_own_modules() -> None:
    """Add the current folder to ``sys.path``, as ``python -m`` does, so that recipes can name classes in its files.

    The folder comes last, so that it does not shadow installed packages.
    """
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def written_out(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a subcommand of LightningCLI with this command's shorthands expanded.

    The shorthands are recipes given by name or without ``--config``, strategies given by name, ``--optimizer`` for the
    model's optimizer, and ``--trace [FOLDER]`` for a ``PipelineTrace`` callback.

    Raises:
        ConfigurationError: an argument names a recipe that does not exist.
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
            # The callback is added last: a later --config would replace the list of callbacks.
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
    """Return the class for the value of a strategy; ``None`` for names that only the Trainer knows.

    With a class, jsonargparse accepts options of the strategy and checks them; with a name, it does not.
    """
    return STRATEGIES.get(value) or (value if _CLASS_NAME.fullmatch(value) else None)
