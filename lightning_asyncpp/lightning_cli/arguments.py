"""What stands for other arguments, or goes before them, until LightningCLI reads them; nothing heavy is imported.

Recipes that come with the package go by their names: ``asyncpp fit quickstart``.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.lightning_cli.help import SUBCOMMANDS

_OPTIONS = ("-c", "--config")
_LISTED = 3
_LIKE_A_NAME = re.compile(r"[\w./-]+")  # --config takes YAML and "-", too


def package_recipes() -> dict[str, Path]:
    """Name -> file: ``quickstart`` and so on."""
    package = Path(__file__).parents[1]
    installed, of_checkout = package / "recipes", package.parent / "recipes"
    folder = installed if installed.is_dir() else of_checkout
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.yaml"))}


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
    recipes = package_recipes()
    name = given.removeprefix("./").removeprefix("recipes/").removesuffix(".yaml")
    if name in recipes:
        return str(recipes[name])
    if given == "-":
        return given
    if os.path.isdir(given):
        inside = ", ".join(sorted(str(path) for path in Path(given).glob("*.yaml"))[:_LISTED])
        raise ConfigurationError(
            f"{given} is a folder, and a recipe is a file{f', such as {inside}' if inside else ''}"
        )
    raise unknown_recipe(given, name, recipes)


def unknown_recipe(given: str, name: str, recipes: Iterable[str]) -> ConfigurationError:
    """The error that names the recipes whose names are nearest.

    Args:
        given: by the user.
        name: that it stands for.
        recipes: names of all.
    """
    same = [recipe for recipe in recipes if recipe.rpartition("/")[2] == name]
    nearest = same or difflib.get_close_matches(name, list(recipes))
    hint = f"the nearest of the package's: {', '.join(nearest)}; " if nearest else ""
    return ConfigurationError(
        f"there is no recipe {given}, neither a file nor a name ({hint}`asyncpp recipes` lists them)"
    )


def with_recipe_paths(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command, with files where ``--config`` names recipes of the package.

    Raises:
        ConfigurationError: there is neither such a file nor such a recipe.
    """
    written = []
    value_follows = False
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if value_follows:
            written.append(recipe_path(argument))
        elif option in _OPTIONS and equals:
            written.append(f"{option}={recipe_path(value)}")
        else:
            written.append(argument)
        value_follows = not value_follows and argument in _OPTIONS
    return written


STRATEGIES = {
    "async_pipeline": "lightning_asyncpp.AsyncPipelineStrategy",
    "sync_pipeline": "lightning_asyncpp.SyncPipelineStrategy",
    "delayed_gradient": "lightning_asyncpp.DelayedGradientStrategy",
}
"""Name of a strategy for the Trainer -> its class, which takes options where the name alone would not."""
READ_RECIPES = frozenset({*SUBCOMMANDS, "check", "plan"})
"""Commands whose arguments are those of a recipe."""
_OTHERS = re.compile(r"--model\b|-h$|--help\b|--print_|--\S+\.help\b")
"""Options with which a subcommand can do without a recipe."""
_CLASS_NAME = re.compile(r"(\w+\.)*[A-Z]\w*")
CONFIG = ("--config", "-c")
_STRATEGY = "--trainer.strategy"

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

    Raises:
        ConfigurationError: there is no recipe that they name.
    """
    return with_recipe_paths(with_trace(_with_optimizer(_with_strategy(_with_recipe(arguments)))))


def recipes_first(arguments: Sequence[str]) -> list[str]:
    """Let names before all options stand for ``--config``: ``RECIPE --trainer.max_steps 7``."""
    count = next((index for index, argument in enumerate(arguments) if argument.startswith("-")), len(arguments))
    return [part for recipe in arguments[:count] for part in ("--config", recipe)] + list(arguments[count:])


def recipes_in(arguments: Sequence[str]) -> list[str]:
    """The recipes that the arguments name, in order."""
    recipes: list[str] = []
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in CONFIG:
            recipes += [value] if equals else arguments[index + 1 : index + 2]
    return recipes


def recipes_named(arguments: Sequence[str]) -> list[str]:
    """The recipes of a subcommand, as they were given: by their place or as ``--config``."""
    return recipes_in(_with_recipe(arguments))


def refuse_without_recipe(arguments: Sequence[str]) -> None:
    """Refuse a command that was told neither a recipe nor a model, and is asked nothing else.

    Args:
        arguments: what follows ``asyncpp``.

    Raises:
        ConfigurationError: it is one that reads recipes.
    """
    if not arguments or arguments[0] not in READ_RECIPES or recipes_named(arguments):
        return
    options = arguments[1:]
    if options and (arguments[0] not in SUBCOMMANDS or any(map(_OTHERS.match, options))):
        return  # a tool may have its recipe after its options
    raise ConfigurationError(
        f"{arguments[0]} needs a recipe, a YAML file or a name among `asyncpp recipes`; for instance: asyncpp"
        f" {arguments[0]} quickstart"
    )


def _with_recipe(arguments: Sequence[str]) -> list[str]:
    """The same after the subcommand, if there is one."""
    is_given = arguments and not arguments[0].startswith("-")
    return [arguments[0], *recipes_first(arguments[1:])] if is_given else list(arguments)


def class_of_strategy(value: str) -> str | None:
    """The class that a strategy's value stands for; ``None`` for a name that only the Trainer knows, and for no name.

    The Trainer takes names without options, and jsonargparse takes any text for such a name.
    """
    return STRATEGIES.get(value) or (value if _CLASS_NAME.fullmatch(value) else None)


def _with_strategy(arguments: Sequence[str]) -> list[str]:
    """Let the name of a strategy, or of its class, stand for the class, whose options can follow."""
    replaced: list[str] = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if replaced and replaced[-1] == _STRATEGY and (found := class_of_strategy(argument)):
            argument = json.dumps({"class_path": found})
        elif name == _STRATEGY and equals and (found := class_of_strategy(value)):
            argument = f"{name}={json.dumps({'class_path': found})}"
        replaced.append(argument)
    return replaced


def _with_optimizer(arguments: Sequence[str]) -> list[str]:
    """Let ``--optimizer ...`` stand for the module's argument of that name."""
    short, full = "--optimizer", "--model.init_args.optimizer"
    replaced = []
    value_follows = False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if value_follows:
            replaced.append(_WHOLE_MODEL.get(argument, argument))
            value_follows = False
        elif name == short or name.startswith(f"{short}."):
            replaced.append(full + name[len(short) :] + equals + _WHOLE_MODEL.get(value, value))
            value_follows = not equals
        else:
            replaced.append(argument)
    return replaced


def with_trace(arguments: Sequence[str]) -> list[str]:
    """Let ``fit --trace [FOLDER]`` and ``--trace.mini_batches N`` stand for a ``PipelineTrace`` among the callbacks."""
    if list(arguments[:1]) != ["fit"]:
        return list(arguments)
    short, full = "--trace", "--trainer.callbacks"
    rest, options = [], []
    left = list(arguments)
    while left:
        name, equals, value = left.pop(0).partition("=")
        if name != short and not name.startswith(f"{short}."):
            rest.append(name + equals + value)
            continue
        if not equals and left and not left[0].startswith("--"):
            equals, value = "=", left.pop(0)
        argument = name[len(short) :] or ".dirpath"
        options += [f"{full}{argument}{equals}{value}"] if equals or name != short else [""]
    if not options:
        return rest
    # Last, so that no --config takes the place of the list that it is added to.
    return [*rest, f"{full}+=lightning_asyncpp.PipelineTrace", *filter(None, options)]
