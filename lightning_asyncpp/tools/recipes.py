"""``asyncpp recipes``: the recipes that come with the package, listed, or one of them copied for editing."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml  # type: ignore[import-untyped, unused-ignore]

from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.lightning_cli.recipe_names import package_recipes, unknown_recipe
from lightning_asyncpp.tools.parsers import recipes_parser

_WIDTH = 120
_GROUPS = {
    "to begin with, two processes on the CPU": "quickstart",
    "models of the Hugging Face Hub, on GPUs": "hf_",
    "from random weights, on GPUs": "",
}
"""Title -> what the names of its recipes begin with; a recipe is in the first group that fits."""
_EXPERIMENTS, _PARTS = "ablation/", "ablation/base/"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the list, or what was copied.

    Raises:
        ConfigurationError: there is no such recipe, or nothing can be written where it should go.
    """
    parser = recipes_parser()
    arguments = parser.parse_args(argv)
    if arguments.copy is not None:
        print("\n".join(f"wrote {path}" for path in copy_recipe(arguments.copy, Path(arguments.folder or "."))))
    elif arguments.folder is not None:
        parser.error(f"FOLDER={arguments.folder} is for --copy NAME")
    else:
        print(_listed(with_experiments=arguments.all))


def copy_recipe(name: str, folder: Path) -> list[Path]:
    """Copy a recipe of the package, and what it is made from; no file is written over.

    Args:
        name: of the recipe.
        folder: made if it is not there.

    Returns:
        The files, the recipe's first.

    Raises:
        ConfigurationError: there is no such recipe, or nothing can be written there.
    """
    recipes = package_recipes()
    if name not in recipes:
        raise unknown_recipe(name, name, recipes)
    files = {folder / place: source for place, source in _with_base(recipes[name]).items()}
    if there := [str(path) for path in files if path.exists()]:
        raise ConfigurationError(f"{', '.join(there)}: already there, and not written over; name another folder")
    try:
        for path, source in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, path)
    except OSError as error:
        raise ConfigurationError(f"{folder}: the recipe cannot be written there ({error.strerror})") from None
    return list(files)


def _with_base(path: Path) -> dict[str, Path]:
    """Place in the folder of a copy -> file, of a recipe, and of the one that an ablation trains."""
    base = yaml.safe_load(path.read_text(encoding="utf-8")).get("recipe")
    return {path.name: path} | ({base: path.parent / base} if base else {})


def _listed(with_experiments: bool) -> str:
    """The recipes of `asyncpp fit` in groups, then those of `asyncpp ablate`, or how many there are."""
    recipes = package_recipes()
    left = {name: path for name, path in recipes.items() if not name.startswith(_EXPERIMENTS)}
    blocks = []
    for title, beginning in _GROUPS.items():
        blocks.append(_block(title, {name: left.pop(name) for name in list(left) if name.startswith(beginning)}))
    blocks.append("`asyncpp fit NAME` trains one; `asyncpp recipes --copy NAME [FOLDER]` writes one to edit.\n")
    grids = {name: path for name, path in recipes.items() if name.startswith(_EXPERIMENTS)}
    parts = {name: grids.pop(name) for name in list(grids) if name.startswith(_PARTS)}
    if with_experiments:
        blocks += [_block("experiments, grids of trainings for `asyncpp ablate`", grids)]
        blocks += [_block("what these train", parts)]
    else:
        blocks.append(f"{len(grids)} experiments for `asyncpp ablate`: `asyncpp recipes --all` lists them, too.\n")
    return "\n".join(blocks).rstrip("\n")


def _block(title: str, recipes: Mapping[str, Path]) -> str:
    """A group, recipe by recipe the name and what it is."""
    width = max(map(len, recipes)) + 2
    lines = [f"  {name:<{width}}{_about(path, _WIDTH - width - 2)}" for name, path in recipes.items()]
    return "\n".join([f"{title}:", *lines, ""])


def _about(path: Path, width: int) -> str:
    """The first sentence of the comment that a recipe begins with."""
    comment = re.match(r"(?:#.*\n)*", path.read_text(encoding="utf-8"))
    text = " ".join(line.lstrip("# ") for line in comment.group().splitlines()) if comment else ""
    sentence = re.split(r"(?<=[.?]) ", text, maxsplit=1)[0]
    return textwrap.shorten(sentence, width, placeholder=" ...")
