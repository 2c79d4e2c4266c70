"""Parser of recipes with short error messages, and instantiation of single keys of a recipe."""

from __future__ import annotations

import pkgutil
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.cli import LightningArgumentParser

from lightning_asyncpp.lightning_cli.arguments import STRATEGIES, class_of_strategy
from lightning_asyncpp.lightning_cli.help import did_you_mean

_UNKNOWN = re.compile(
    r"(?:Option|option|Key) '([\w.]+)'|unrecognized arguments: --([\w.-]+)"
    r"|Expected a dot import path string: ([\w.]+)|has no attribute '(\w+)'"
)
_CLASS = re.compile(r"class_path[ =]'([\w.]+)'")
_WRITTEN = ("optimizer", "optimizer.lr", "optimizer.weight_decay", "config", "trace", "trace.mini_batches")
_SECTIONS = {
    "trainer.strategy.": STRATEGIES["async_pipeline"],
    "model.": "lightning_asyncpp.GPTModule",
    "data.": "lightning_asyncpp.data.TextDataModule",
}
"""Section of a recipe -> its class in most recipes, for suggestions if a name is given without its section."""
_PLACES = (
    "lightning_asyncpp", "lightning_asyncpp.data", "lightning_asyncpp.optim", "torch.optim",
    "lightning.pytorch.callbacks", "lightning.pytorch.loggers",
)  # fmt: skip


def explained(message: str, keys: Iterable[str]) -> str:
    """Return a message of jsonargparse with a suggestion for each unknown name that resembles a known one.

    If the message is about a single unknown argument, the suggestion replaces it.

    Args:
        message: message of jsonargparse.
        keys: keys of the parser.
    """
    if "arguments are required" in message:
        return f"{message}. Give a recipe that names a model; `asyncpp recipes` lists those of the package"
    known = [*_of_classes(message), *keys, *_WRITTEN, *_of_sections(), *_class_names()]
    unknown = dict.fromkeys(part for match in _UNKNOWN.finditer(message) for part in match.groups() if part)
    hints = {name: did_you_mean(name, known) for name in unknown if name not in known}
    found = [f"there is no {name!r}{hint}" for name, hint in hints.items() if hint]
    if found and message.startswith("unrecognized arguments: ") and message.count(" --") == 1:
        return found[0]
    return "\n".join([*found, f"{message}\n(`asyncpp fit --help=full` lists the options)"])


def _of_classes(message: str) -> Iterator[str]:
    """Yield the arguments of the classes that a message names."""
    for path in dict.fromkeys(_CLASS.findall(message)):
        yield from _arguments_of(path)


def _of_sections() -> Iterator[str]:
    for section, class_path in _SECTIONS.items():
        yield from (section + name for name in _arguments_of(class_path))


def _class_names() -> Iterator[str]:
    for place in _PLACES:
        yield from (name for name, value in vars(import_module(place)).items() if isinstance(value, type))


def _arguments_of(class_path: str) -> list[str]:
    """Return the arguments of a class, with the fields of dataclasses; an empty list if they cannot be found."""
    parser = ArgumentParser(exit_on_error=False)
    try:
        parser.add_class_arguments(pkgutil.resolve_name(class_path), fail_untyped=False)
        return [str(key) for key in parser.get_defaults(skip_validation=True).keys(branches=True) if key != "params"]
    except Exception:  # a user's class may have a signature that cannot be parsed: no suggestions then
        return []


class RecipeParser(LightningArgumentParser):
    """Parser with short error messages that suggest similar names."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # With abbreviations a misspelt name may be taken for a longer one: ``--trainer.max_step`` for ``max_steps``.
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """End the process with only the message; the usage, a screen full of options, would hide it."""
        if not self.exit_on_error:
            super().error(message, ex)
        parser: RecipeParser = getattr(ex, "subcommand_parser", None) or self
        known = map(str, parser.get_defaults(skip_validation=True).keys(branches=True))
        self.exit(2, f"asyncpp: error: {explained(message, known)}\n")

    def parse_string(self, *args: Any, **kwargs: Any) -> Namespace:
        """Read a recipe, and replace the name of a strategy by its class, which accepts options."""
        configuration: Namespace = super().parse_string(*args, **kwargs)
        strategy = configuration.get("trainer.strategy")
        if isinstance(strategy, str) and (found := class_of_strategy(strategy)):
            configuration["trainer.strategy"] = Namespace(class_path=found)
        return configuration


def instantiated(parser: ArgumentParser, key: str, value: Mapping[str, Any]) -> Any:
    """Make the object of a class and its arguments.

    Args:
        parser: parser of ``key``.
        key: key of the recipe.
        value: class and arguments, as in the recipe.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the method is deprecated in newer versions of jsonargparse
        return parser.instantiate_classes(parser.parse_object({key: dict(value)}))[key]
