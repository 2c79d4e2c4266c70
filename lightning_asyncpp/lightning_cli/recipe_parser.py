"""The parser of `asyncpp fit`'s recipes, which says what is wrong, and objects of what they say, one key at a time."""

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
"""Where a name without a section may belong, with the class that most recipes have there."""
_PLACES = (
    "lightning_asyncpp", "lightning_asyncpp.data", "lightning_asyncpp.optim", "torch.optim",
    "lightning.pytorch.callbacks", "lightning.pytorch.loggers",
)  # fmt: skip


def explained(message: str, keys: Iterable[str]) -> str:
    """What to say: a line for each name that does not exist and is near to one that does, and the message.

    Args:
        message: jsonargparse's.
        keys: of the parser.
    """
    if "arguments are required" in message:
        return f"{message} (give a recipe; `asyncpp recipes` lists some that have all that is needed)"
    known = [*_of_classes(message), *keys, *_WRITTEN, *_of_sections(), *_class_names()]
    unknown = dict.fromkeys(part for match in _UNKNOWN.finditer(message) for part in match.groups() if part)
    hints = {name: did_you_mean(name, known) for name in unknown if name not in known}
    return "\n".join([*(f"there is no {name!r}{hint}" for name, hint in hints.items() if hint), message])


def _of_classes(message: str) -> Iterator[str]:
    """The arguments of the classes that a message names."""
    for path in dict.fromkeys(_CLASS.findall(message)):
        yield from _arguments_of(path)


def _of_sections() -> Iterator[str]:
    for section, class_path in _SECTIONS.items():
        yield from (section + name for name in _arguments_of(class_path))


def _class_names() -> Iterator[str]:
    for place in _PLACES:
        yield from (name for name, value in vars(import_module(place)).items() if isinstance(value, type))


def _arguments_of(class_path: str) -> list[str]:
    """The arguments of a class, with those of dataclasses among them; none if they cannot be found."""
    parser = ArgumentParser(exit_on_error=False)
    try:
        parser.add_class_arguments(pkgutil.resolve_name(class_path), fail_untyped=False)
        return [str(key) for key in parser.get_defaults(skip_validation=True).keys(branches=True) if key != "params"]
    except Exception:  # of somebody's class, whose signature is what it is: nothing is suggested
        return []


class RecipeParser(LightningArgumentParser):
    """Says what is wrong, and which name may have been meant."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # A name cut short would be taken for one that begins so: ``--trainer.max_step`` for ``max_steps``.
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """End with what is wrong; the usage, a screen of options, would hide it."""
        if not self.exit_on_error:
            super().error(message, ex)
        parser: RecipeParser = getattr(ex, "subcommand_parser", None) or self
        known = map(str, parser.get_defaults(skip_validation=True).keys(branches=True))
        self.exit(2, f"asyncpp: error: {explained(message, known)}\n(`asyncpp fit --help=full` lists the options)\n")

    def parse_string(self, *args: Any, **kwargs: Any) -> Namespace:
        """Read a recipe; arguments are jsonargparse's. A strategy's name stands for its class: options can follow."""
        configuration: Namespace = super().parse_string(*args, **kwargs)
        strategy = configuration.get("trainer.strategy")
        if isinstance(strategy, str) and (found := class_of_strategy(strategy)):
            configuration["trainer.strategy"] = Namespace(class_path=found)
        return configuration


def instantiated(parser: ArgumentParser, key: str, value: Mapping[str, Any]) -> Any:
    """The object that ``value``, class and arguments, describes.

    Args:
        parser: one that takes ``key``.
        key: of the recipe.
        value: known to be accepted by it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of jsonargparse call it `instantiate`
        return parser.instantiate_classes(parser.parse_object({key: dict(value)}))[key]
