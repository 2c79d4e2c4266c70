"""All that is wrong with the names and values of a command: jsonargparse stops at the first.

What it complains of is taken out, and the rest is read again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

_MOST = 20
_BETWEEN = re.compile(r"\.(?:init_args|dict_kwargs)(?=\.|$)")  # a class and its arguments
_OPTION_OF_ONE_LETTER = re.compile(r"-[A-Za-z]$")


class Mistake(NamedTuple):
    """One thing that is wrong.

    Attributes:
        said: what, in a line or two.
        key: what has to go for the rest to be read, without ``init_args``; empty if that is not known.
        class_name: that does not exist; in a list the other entries can stay.
    """

    said: str
    key: str = ""
    class_name: str = ""


class Mistaken(BaseException):
    """Arguments or a recipe are wrong; no Exception, for jsonargparse catches those of types that it tries in vain.

    Attributes:
        mistakes: that were found; at least one.
        advice: where to read more.
    """

    def __init__(self, mistakes: Sequence[Mistake], advice: str) -> None:
        super().__init__(mistakes[0].said)
        self.mistakes, self.advice = list(mistakes), advice


_left_out: ContextVar[Sequence[Mistake] | None] = ContextVar("left_out", default=None)


def is_collecting() -> bool:
    """Whether mistakes are collected, so that they are to be raised as :class:`Mistaken`."""
    return _left_out.get() is not None


@contextmanager
def collecting(left_out: Sequence[Mistake] = ()) -> Iterator[None]:
    """Read recipes without what is known to be wrong with them, and let further mistakes be raised."""
    token = _left_out.set(left_out)
    try:
        yield
    finally:
        _left_out.reset(token)


def further(found: Sequence[Mistake], read: Callable[[Sequence[Mistake]], None]) -> list[Mistake]:
    """What else is wrong beside the mistakes that were found.

    Args:
        found: at least one.
        read: reads everything without what has to go for these; raises :class:`Mistaken`.
    """
    known, more = list(found), []
    while all(mistake.key for mistake in known) and len(known) < _MOST:
        try:
            with collecting(known):
                read(known)
        except (AttributeError, LookupError, TypeError, ValueError):
            break  # as below
        except Mistaken as mistaken:
            new = [m for m in mistaken.mistakes if m.key and m not in known]
            if not new:
                break  # it may lack what was taken out
            known += new
            more += new
        else:
            break
    return more


def recipe_without_mistakes(content: Any) -> Any:
    """The content of a recipe without the mistakes that are known."""
    return _without(content, "", _left_out.get() or ())


def arguments_without(arguments: Sequence[str], mistakes: Collection[Mistake]) -> list[str]:
    """The arguments without the options, and their values, that are mistakes."""
    kept, goes = [], False
    for argument in arguments:
        if argument.startswith("--") or _OPTION_OF_ONE_LETTER.match(argument):
            key = _plain(argument.partition("=")[0].removeprefix("--").removesuffix("+"))
            goes = any(key == mistake.key or key.startswith(f"{mistake.key}.") for mistake in mistakes)
        if not goes:
            kept.append(argument)
    return kept


def _without(content: Any, key: str, mistakes: Collection[Mistake]) -> Any:
    if isinstance(content, list):
        names = [mistake.class_name for mistake in mistakes if mistake.class_name and mistake.key == key]
        return [_without(entry, key, mistakes) for entry in content if not _is_of(entry, names)]
    if not isinstance(content, Mapping):
        return content
    left = {}
    for name, value in content.items():
        below = _plain(f"{key}.{name}".lstrip("."))
        here = [mistake for mistake in mistakes if mistake.key == below]
        goes = bool(here) and below != key
        if goes and isinstance(value, list) and all(mistake.class_name for mistake in here):
            goes = False  # entries of it go
        kept = None if goes else _without(value, below, mistakes)
        if not goes and (kept or kept == value):
            left[name] = kept  # what is empty now was there for what is gone
    return left


def _is_of(entry: Any, names: Collection[str]) -> bool:
    """Whether an entry of a list is, or is of, a class with one of these names."""
    given = entry.get("class_path") if isinstance(entry, Mapping) else entry
    return isinstance(given, str) and given.rpartition(".")[2] in names


def _plain(key: str) -> str:
    """A key without what stands between a class and its arguments."""
    return _BETWEEN.sub("", key)
