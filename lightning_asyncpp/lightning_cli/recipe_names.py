"""Recipes that come with the package, and the names they go by: ``asyncpp fit --config quickstart``."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from lightning_asyncpp.errors import ConfigurationError

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
