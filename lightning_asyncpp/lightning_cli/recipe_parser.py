"""The parser of `asyncpp fit`'s recipes, which says what is wrong, and objects of what they say, one key at a time."""

from __future__ import annotations

import os
import pkgutil
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.cli import LightningArgumentParser

from lightning_asyncpp.lightning_cli.arguments import STRATEGIES, class_of_strategy
from lightning_asyncpp.lightning_cli.help import nearest

_UNKNOWN = re.compile(
    r"(?:Option|option|Key) '([\w.]+)'|unrecognized arguments: --([\w.-]+)"
    r"|Expected a dot import path string: ([\w.]+)|has no attribute '(\w+)'"
)
_CLASS = re.compile(r"class_path '([\w.]+)'|class_path='([\w.]+)'")
_REQUIRED = re.compile(r"the following arguments are required: (.*)$", re.MULTILINE)
_WRITTEN = ("optimizer", "optimizer.lr", "optimizer.weight_decay", "config", "trace", "trace.mini_batches")
_SECTIONS = {
    "trainer.strategy": STRATEGIES["async_pipeline"],
    "model": "lightning_asyncpp.GPTModule",
    "data": "lightning_asyncpp.data.TextDataModule",
}
"""Where a name without a section may belong, with the class that most recipes have there."""
_PLACES = (
    "lightning_asyncpp", "lightning_asyncpp.data", "lightning_asyncpp.optim", "torch.optim",
    "lightning.pytorch.callbacks", "lightning.pytorch.loggers",
)  # fmt: skip


def explained(message: str, known: Iterable[str]) -> str:
    """What to say: a line for each name that does not exist and is near to one that does, and the message.

    Args:
        message: jsonargparse's.
        known: the keys of the parser, and options of the tool that it reads the rest for.
    """
    if required := _REQUIRED.search(message):
        return missing(required.group(1).split(", "))
    candidates = [*dict.fromkeys([*known, *_WRITTEN, *_of_classes(message), *_of_sections(), *_class_names()])]
    unknown = dict.fromkeys(part for match in _UNKNOWN.finditer(message) for part in match.groups() if part)
    lines = [
        f"there is no {name!r}; did you mean {' or '.join(near)}?"
        for name in unknown
        if name not in candidates and (near := nearest(name, candidates))
    ]
    return "\n".join([*lines, message])


def missing(keys: Iterable[str]) -> str:
    """What to say where recipes and options leave out whole sections."""
    sections = " and ".join(f"`{key.rpartition('.')[2]}:`" for key in sorted(keys, reverse=True))
    return f"no recipe and no option says {sections}; `asyncpp recipes` lists recipes that have all that is needed"


def _of_classes(message: str) -> Iterator[str]:
    """The arguments of the classes that a message names."""
    for path in dict.fromkeys(first or second for first, second in _CLASS.findall(message)):
        yield from _arguments_of(path)


def _of_sections() -> Iterator[str]:
    for section, class_path in _SECTIONS.items():
        yield from (f"{section}.{name}" for name in _arguments_of(class_path))


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


_DEBUG = "JSONARGPARSE_DEBUG"  # has jsonargparse raise what it found


class RecipeParser(LightningArgumentParser):
    """Says what is wrong, and which name may have been meant.

    Args:
        own_options: of the tool that this parser reads the rest of the arguments for.
    """

    def __init__(self, *args: Any, own_options: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})  # those of classes inside get no arguments
        self._own_options = list(own_options)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """End with what is wrong; the usage, a screen of options, would hide it."""
        if not self.exit_on_error or _DEBUG in os.environ:
            super().error(message, ex)
        parser: RecipeParser = getattr(ex, "subcommand_parser", None) or self
        known = [*parser.get_defaults(skip_validation=True).keys(branches=True), *self._own_options]
        full = "" if self._own_options else "=full"
        program = str(parser.prog).replace(" [options]", "")
        self.exit(
            2, f"asyncpp: error: {explained(message, map(str, known))}\n(`{program} --help{full}` lists the options)\n"
        )

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
