"""The parser of `asyncpp fit`'s recipes, and objects of what they say, one key at a time.

It refuses unknown names with nothing under them, too, and says what is wrong first.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import yaml  # type: ignore[import-untyped, unused-ignore]
from jsonargparse import ArgumentParser, Namespace, get_loader
from lightning.pytorch.cli import LightningArgumentParser

from lightning_asyncpp.lightning_cli.arguments import class_of_strategy
from lightning_asyncpp.lightning_cli.explained import explained
from lightning_asyncpp.lightning_cli.nearest import advice

_DEBUG = "JSONARGPARSE_DEBUG"  # has jsonargparse raise what it found


class RecipeParser(LightningArgumentParser):
    """Says in a line what is wrong; refuses ``trainr: {}``, which jsonargparse drops before it looks at names.

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
        parser = getattr(ex, "subcommand_parser", None) or self
        program = parser.prog.replace(" [options]", "")
        known = [*parser.get_defaults(skip_validation=True).keys(branches=True), *self._own_options]
        full = "" if self._own_options else "=full"
        said = explained(message, map(str, known), program)
        self.exit(2, f"asyncpp: error: {said}\n(`{program} --help{full}` lists the options)\n")

    def parse_string(self, content: str, *args: Any, **kwargs: Any) -> Namespace:
        """Read a recipe."""
        known = self.get_defaults()
        for name, value in _no_sections(content, known):
            self.error(f"{name}: is a section, with a line `key: value` for each of its keys below; got {value!r}")
        configuration: Namespace = super().parse_string(content, *args, **kwargs)
        if "subcommand" not in known:  # the parser of all subcommands leaves their sections to theirs
            for name in _unknown(get_loader("yaml")(content), known):
                self.error(f"there is no option {name!r}{advice(name, map(str, known.keys(branches=True)))}")
            strategy = configuration.get("trainer.strategy")
            if isinstance(strategy, str) and (found := class_of_strategy(strategy)):  # so that its options can follow
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


def _no_sections(content: str, known: Namespace) -> Iterator[tuple[str, Any]]:
    """Sections that have a value instead of keys; a text may name a file with them."""
    try:
        read = get_loader("yaml")(content)
    except yaml.YAMLError:  # jsonargparse says what is wrong
        return
    for name, value in read.items() if isinstance(read, Mapping) else ():
        is_section = str(name) in known and isinstance(known[str(name)], Namespace)
        if is_section and not (value is None or isinstance(value, Mapping | str)):
            yield str(name), value


def _unknown(content: Any, known: Any) -> Iterator[str]:
    """Names of mappings without any value in them, where none of that name is known."""
    if not isinstance(content, Mapping) or not isinstance(known, Namespace):
        return
    for name, value in content.items():
        if str(name) in known:
            yield from (f"{name}.{below}" for below in _unknown(value, known[str(name)]))
        elif _is_hollow(value):
            yield str(name)


def _is_hollow(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_hollow, value.values()))
