"""Reads a mapping of a recipe key by key and notes every problem instead of stopping at the first."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from lightning_asyncpp.models.config import is_finite
from lightning_asyncpp.pipeline.settings import is_whole


class Section:
    """One mapping of a recipe.

    Args:
        where: its place in the recipe, such as ``optimizers.AdamW``; empty for the whole.
        content: what stands there.
        known: the keys that it may have.
        problems: collects what is wrong.
    """

    def __init__(self, where: str, content: object, known: Sequence[str], problems: list[str]) -> None:
        self.where = where
        self.problems = problems
        self.content: dict[Any, Any] = {}
        if not isinstance(content, dict):
            wanted = f"a mapping with the keys {', '.join(known)}"
            problems.append(f"{where or 'the recipe'}: must be {wanted}, got {content!r}")
            return
        self.content = content
        for key in content:
            if key not in known:
                close = difflib.get_close_matches(str(key), known, 1)
                mend = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
                problems.append(f"{self.place(str(key))}: unknown key; {mend}")

    def place(self, key: str) -> str:
        """The full name of a key."""
        return f"{self.where}.{key}" if self.where else key

    def problem(self, key: str, what: str) -> None:
        """Note that ``key`` is wrong."""
        self.problems.append(f"{self.place(key)}: {what}")

    def text(self, key: str, default: str | None = None) -> str:
        """A text that is not empty; required without a default."""
        value = self.content.get(key, default)
        if value is None and key not in self.content:
            self.problem(key, "is missing; give a text")
        elif not isinstance(value, str) or not value.strip():
            self.problem(key, f"must be a text, got {value!r}" + _quoted(value))
        else:
            return value
        return ""

    def mapping(self, key: str, required: bool = False) -> dict[str, Any]:
        """A mapping; empty if there is none."""
        value = self.content.get(key, None if required else {})
        if isinstance(value, dict) and (value or not required):
            return value
        what = "is missing or empty; give a mapping" if required and not value else f"must be a mapping, got {value!r}"
        self.problem(key, what)
        return {}

    def count(self, key: str, default: int, least: int) -> int:
        """A whole number."""
        value = self.content.get(key, default)
        if is_whole(value) and value >= least:
            return int(value)
        self.problem(key, f"must be a whole number of at least {least}, got {value!r}")
        return default

    def number(self, key: str) -> float | None:
        """A finite number or nothing."""
        value = self.content.get(key)
        if value is None or is_finite(value):
            return None if value is None else float(value)
        self.problem(key, f"must be a number, got {value!r}")
        return None

    def values(self, key: str, default: Sequence[Any] | None = None) -> list[Any]:
        """A list that is not empty and names nothing twice; required without a default."""
        value = self.content.get(key, default)
        if value is None and key not in self.content:
            self.problem(key, "is missing; give a list")
        elif not isinstance(value, (list, tuple)) or not value:
            self.problem(key, f"must be a list with at least one entry, got {value!r}")
        else:
            for index, entry in enumerate(value):
                if entry in value[:index]:
                    self.problem(key, f"names {entry!r} twice")
            return list(value)
        return []

    def numbers(self, key: str, wanted: str, least: float, above: bool = False) -> tuple[float, ...]:
        """A list of finite numbers that are at least ``least``, or above it."""
        found = []
        for value in self.values(key):
            if is_finite(value) and (value > least or (value == least and not above)):
                found.append(float(value))
            else:
                self.problem(key, f"{value!r} is not {wanted}")
        return tuple(sorted(set(found)))


def set_at(content: dict[str, Any], path: str, value: object) -> None:
    """Set what ``path``, keys and list indices with dots between them, points at; mappings are made as needed.

    Raises:
        KeyError: the path leads through something that is neither a mapping nor a list that is long enough; says so.
    """
    place: Any = content
    keys = path.split(".")
    for key, following in zip(keys, [*keys[1:], None]):
        index: Any = int(key) if isinstance(place, list) and key.isdecimal() else key
        if isinstance(place, list) and not (isinstance(index, int) and index < len(place)):
            raise KeyError(f"{path}: there is a list of {len(place)} entries before {key!r}")
        if not isinstance(place, (list, dict)):
            raise KeyError(f"{path}: what is before {key!r} is {place!r}, neither a mapping nor a list")
        if following is None:
            place[index] = value
        else:
            if isinstance(place, dict) and index not in place and following.isdecimal():
                raise KeyError(f"{path}: there is no list {key!r} yet; give it in init_args")
            place = place.setdefault(index, {}) if isinstance(place, dict) else place[index]


def _quoted(value: object) -> str:
    return "; quote it" if isinstance(value, (bool, int, float)) else ""
