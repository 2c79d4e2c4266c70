"""YAML as `asyncpp fit` reads it, repeated keys refused; and its mappings, read key by key, every problem noted."""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]

from lightning_asyncpp.core.settings import is_whole
from lightning_asyncpp.lightning_cli.yaml_limits import VALUE_ERRORS, check_yaml
from lightning_asyncpp.models.config import is_finite

_FLOAT = re.compile(
    r"""^(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+
    |\.[0-9_]+(?:[eE][-+]?[0-9]+)?
    |[-+]?\.(?:inf|Inf|INF)
    |\.(?:nan|NaN|NAN))$""",
    re.X,
)


def _like_the_parser(cls: Any) -> Any:
    """Resolve plain values as jsonargparse does: 1e-3 is a number (YAML 1.1: a text), a date is a text."""
    left_out = ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:float")
    cls.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in left_out]
        for first, resolvers in cls.yaml_implicit_resolvers.items()
    }
    cls.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
    return cls


@_like_the_parser
class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                raise yaml.YAMLError(f"line {node.start_mark.line + 1}: the key {key!r} appears twice; rename one")
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping


@_like_the_parser
class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


def read_yaml(path: Path) -> Any:
    """Read a file.

    Raises:
        ValueError: it cannot be read, is no YAML, or repeats a key; the message names the file.
    """
    try:
        text = path.read_text(encoding="utf-8")
        check_yaml(text)
        return yaml.load(text, Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{path} cannot be read: {reason}") from error
    except (yaml.YAMLError, *VALUE_ERRORS) as error:  # TypeError also for a key that cannot be one, such as a list
        raise ValueError(f"{path} is no YAML that can be used: {error}") from error


def write_yaml(path: Path, content: Any) -> None:
    """Write plain values so that :func:`read_yaml` and ``asyncpp fit`` read the same ones."""
    path.write_text(yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True), encoding="utf-8")


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
