"""``asyncpp recipes``: list the recipes of the package, or copy one for editing."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path

from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.lightning_cli.arguments import package_recipe, package_recipes
from lightning_asyncpp.tools.parsers import recipes_parser

_WIDTH = 120


def main(argv: Sequence[str] | None = None) -> None:
    """Print the list, or the path of the copy.

    Raises:
        ConfigurationError: there is no such recipe, or the file to write exists already.
    """
    parser = recipes_parser()
    arguments = parser.parse_args(argv)
    if arguments.copy is not None:
        print(f"wrote {copy_recipe(arguments.copy, Path(arguments.folder or '.'))}")
    elif arguments.folder is not None:
        parser.error(f"FOLDER={arguments.folder} works only with --copy NAME")
    else:
        print(_listed())


def copy_recipe(name: str, folder: Path) -> Path:
    """Copy a recipe of the package without overwriting a file.

    Args:
        name: name of the recipe.
        folder: folder of the copy, made if needed.

    Returns:
        The path of the copy.

    Raises:
        ConfigurationError: there is no such recipe, or the folder has a file of that name.
        OSError: the folder is not writable.
    """
    recipe = package_recipe(name)
    path = folder / recipe.name
    if path.exists():
        raise ConfigurationError(f"{path} exists already; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(recipe, path)
    return path


def _listed() -> str:
    """Return the names and descriptions of the recipes, one per line."""
    recipes = package_recipes()
    width = max(map(len, recipes)) + 2
    lines = [f"{name:<{width}}{_about(path, _WIDTH - width)}" for name, path in recipes.items()]
    usage = "`asyncpp fit NAME` trains one; `asyncpp recipes --copy NAME [FOLDER]` writes one to edit."
    return "\n".join([*lines, "", usage])


def _about(path: Path, width: int) -> str:
    """Return the first sentence of a recipe's first comment."""
    comment = re.match(r"(?:#.*\n)*", path.read_text(encoding="utf-8"))
    text = " ".join(line.lstrip("# ") for line in comment.group().splitlines()) if comment else ""
    sentence = re.split(r"(?<=[.?]) ", text, maxsplit=1)[0]
    return textwrap.shorten(sentence, width, placeholder=" ...")
