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

from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.lightning_cli.arguments import class_of_strategy
from lightning_asyncpp.lightning_cli.explained import explained
from lightning_asyncpp.lightning_cli.mistakes import Mistake, Mistaken, is_collecting, recipe_without_mistakes
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
        parser: RecipeParser = getattr(ex, "subcommand_parser", None) or self
        known = [*parser.get_defaults(skip_validation=True).keys(branches=True), *self._own_options]
        parser._refuse(explained(message, map(str, known), parser._program))

    @property
    def _program(self) -> str:
        """As it is called."""
        return str(self.prog).replace(" [options]", "")

    def _refuse(self, mistakes: Sequence[Mistake]) -> NoReturn:
        full = "" if self._own_options else "=full"
        mistaken = Mistaken(mistakes, f"(`{self._program} --help{full}` lists the options)")
        if is_collecting():
            raise mistaken
        self.say(mistaken)

    def say(self, mistaken: Mistaken) -> NoReturn:
        """End with what is wrong."""
        error = ConfigurationError.from_problems([mistake.said for mistake in mistaken.mistakes])
        self.exit(2, f"asyncpp: error: {error}\n{mistaken.advice}\n")

    def parse_string(self, content: str, path: str | os.PathLike = "", *args: Any, **kwargs: Any) -> Namespace:
        """Read a recipe; arguments are jsonargparse's."""
        known = self.get_defaults()
        read = self._read(content, str(path))
        if is_collecting() and (left := recipe_without_mistakes(read)) != read:
            read, content = left, str(yaml.safe_dump(left))
        if wrong := list(_no_sections(read, known)):
            self._refuse(wrong)
        configuration: Namespace = super().parse_string(content, path, *args, **kwargs)
        if "subcommand" not in known:  # the parser of all subcommands leaves their sections to theirs
            names = [str(key) for key in known.keys(branches=True)]
            if unknown := list(_unknown(read, known)):
                said = (f"there is no option {name!r}{advice(name, names)}" for name in unknown)
                self._refuse([Mistake(text, name) for text, name in zip(said, unknown)])
            strategy = configuration.get("trainer.strategy")
            if isinstance(strategy, str) and (found := class_of_strategy(strategy)):  # so that its options can follow
                configuration["trainer.strategy"] = Namespace(class_path=found)
        return configuration

    def _read(self, content: str, path: str) -> Mapping[Any, Any]:
        """What the YAML holds.

        Args:
            content: the YAML.
            path: of the file that it is from, if it is from one.
        """
        name = os.path.basename(path) or "a recipe"
        try:
            read = get_loader("yaml")(content)
        except yaml.YAMLError as error:
            where = str(error).replace(' in "<unicode string>",', " in it,")
            self._refuse([Mistake(f"{name} is no YAML that can be read: {where}")])
        if not isinstance(read, Mapping):
            found = "is empty" if read is None else f"holds {read!r:.60}"
            said = f"{name} {found}: a recipe has sections, such as `trainer:`, each with lines `key: value` below"
            self._refuse([Mistake(f"{said}; `asyncpp recipes --copy quickstart` writes one to begin with")])
        return read


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


def _no_sections(read: Mapping[Any, Any], known: Namespace) -> Iterator[Mistake]:
    """Sections that have a value instead of keys; a text may name a file with them."""
    for name, value in read.items():
        is_section = str(name) in known and isinstance(known[str(name)], Namespace)
        if is_section and not (value is None or isinstance(value, Mapping | str)):
            said = f"{name}: is a section, with a line `key: value` for each of its keys below; got {value!r}"
            yield Mistake(said, str(name))


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
