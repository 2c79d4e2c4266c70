"""Options of a benchmark: the fields of a dataclass, given on the command line."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar("T")


def parse_options(kind: type[T], command: str, argv: Sequence[str]) -> T:
    """Read a dataclass from the command line.

    Args:
        kind: the dataclass. Every field has a default, which gives the type; ``metadata["type"]`` gives that of an
            option whose default is None. A tuple takes several values.
        command: its name, for the help, which is the docstring of ``kind``.
        argv: the arguments.
    """
    parser = argparse.ArgumentParser(
        f"python -m research.benchmarks {command}",
        description=inspect.getdoc(kind),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for field in fields(kind):  # type: ignore[arg-type]
        default: Any = field.default
        several = isinstance(default, tuple)
        of = field.metadata.get("type") or type(default[0] if several else default)
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, nargs="+" if several else None, type=of, default=default, help=f"default: {default}")
    given = vars(parser.parse_args(argv))
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})
