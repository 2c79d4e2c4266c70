"""The parser of `asyncpp fit`'s recipes, and objects of what they say, one key at a time."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.cli import LightningArgumentParser

from lightning_asyncpp.lightning_cli.arguments import class_of_strategy
from lightning_asyncpp.lightning_cli.explained import explained

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
