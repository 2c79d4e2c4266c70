"""Objects of what a recipe of `asyncpp fit` says, one key at a time."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from jsonargparse import ArgumentParser


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
