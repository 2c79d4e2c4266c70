"""Limits of what is read as YAML: no recipe comes near them, and what does would take all memory or never end."""

from __future__ import annotations

import functools
import re
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]
from jsonargparse import get_loader, set_loader

MOST_NODES = 10_000
MOST_LEVELS = 32
MOST_DIGITS = 400  # more than any number has that a computer calculates with
VALUE_ERRORS = (ValueError, TypeError, AttributeError, LookupError, OverflowError)
"""What PyYAML raises, unlike at any other mistake, for a value that it cannot make: ``!!float x``, or a float to
the base 60 (``1:30.0``) with too many colons."""
_PLAIN = re.compile(r"[\w./ -]{0,400}")  # most values that a parser asks about have nothing in them that nests
_NUMBER = re.compile(r"[-+]?[0-9_:]+")
_EVENTS = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_read = get_loader("yaml")


class TooMuchError(yaml.YAMLError):  # type: ignore[misc, unused-ignore]
    """Is this YAML of a size that somebody wrote?"""


def limit_yaml() -> None:
    """Let jsonargparse refuse what is too large, too deep, or contains itself, wherever it reads YAML."""
    if get_loader("yaml") is _read:
        set_loader("yaml", _read_within_limits, (yaml.YAMLError,))


@functools.wraps(_read)
def _read_within_limits(text: str) -> Any:
    check_yaml(text)
    try:
        return _read(text)
    except VALUE_ERRORS as error:
        raise yaml.YAMLError(f"a value that is too large, or not what the tag before it says: {error}") from error


def check_yaml(text: str) -> None:
    """Refuse YAML that is too large, too deep, or contains itself; nothing is built for it.

    Args:
        text: YAML, also of one value.

    Raises:
        TooMuchError: it is.
        yaml.YAMLError: it is no YAML at all.
    """
    if _PLAIN.fullmatch(text) and not text.lstrip().startswith("-"):
        return
    nodes = _Nodes()
    # One event after the other: what nests is not followed downwards, which a parser in C does not survive.
    for event in yaml.parse(text, Loader=_EVENTS):
        nodes.take(event)


class _Nodes:
    """Counts the nodes of a document, those that an alias stands for each time."""

    def __init__(self) -> None:
        self._open: list[tuple[str | None, int]] = []  # the anchors around this place, and the count before each
        self._sizes: dict[str, int] = {}  # of what is anchored
        self._count = 0

    def take(self, event: Any) -> None:
        """Count one more event of the parser."""
        anchor = getattr(event, "anchor", None)
        if isinstance(event, yaml.AliasEvent):
            if any(anchor == around for around, _ in self._open):
                raise TooMuchError(f"*{anchor} stands inside of what it stands for (line {event.start_mark.line + 1})")
            self._count += self._sizes.get(anchor or "", 0)
        elif isinstance(event, yaml.ScalarEvent):
            self._count += 1
            self._take_scalar(event)
            if anchor:
                self._sizes[anchor] = 1
        elif isinstance(event, yaml.CollectionStartEvent):
            self._open.append((anchor, self._count))
            self._count += 1
            if len(self._open) > MOST_LEVELS:
                raise TooMuchError(
                    f"more than {MOST_LEVELS} levels inside of each other (line {event.start_mark.line + 1})"
                )
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = self._open.pop()
            if anchor:
                self._sizes[anchor] = self._count - before
        if self._count > MOST_NODES:
            raise TooMuchError(f"more than {MOST_NODES} values, those counted that aliases repeat")

    def _take_scalar(self, event: Any) -> None:
        if len(event.value) > MOST_DIGITS and _NUMBER.fullmatch(event.value):
            raise TooMuchError(f"a number of {len(event.value)} characters (line {event.start_mark.line + 1})")
