"""The names that may have been meant, above what jsonargparse complains of."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterable, Iterator
from importlib import import_module

from jsonargparse import ArgumentParser

from lightning_asyncpp.lightning_cli.arguments import STRATEGIES
from lightning_asyncpp.lightning_cli.nearest import nearest

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
