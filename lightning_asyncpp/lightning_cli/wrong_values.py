"""What jsonargparse complains of where a value is not of the type that a key takes, in a line.

It tells of every type that it tried, indented below the key, class by class. The innermost key is the one that was
given the value.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_asyncpp.lightning_cli.mistakes import Mistake

_KEY = re.compile(r'Parser key "([\w.+]+)"')
_EXPECTED = re.compile(r"(?:Expected an? |Not a valid subclass of )(.+?)(?:\. Got value: (.*))?$")
_NO_TYPE = ("path but ", "dot import path")
_PROBLEM = re.compile(r"Problem with given class_path '[\w.]+':$")
_SUBTYPES = re.compile(r"Subtypes: \[(.*)\]$")
_GIVEN = "Given value: "
_AROUND = ". Got value: Namespace("  # the arguments among which a value stands
_COMMA = re.compile(r", (?![^\[]*\])")
_LONGEST = 80


@dataclass
class _Complaint:
    keys: tuple[str, ...]
    types: list[str]
    value: str | None
    is_of_class: bool = False  # something is wrong with the class itself, as with what its module imports


def wrong_value(message: str) -> Mistake | None:
    """Which key has a value of a wrong type, and what it takes; None if the message is about nothing of the kind.

    Args:
        message: jsonargparse's.
    """
    found = [complaint for complaint in _complaints(message) if complaint.keys]
    if not found:
        return None
    innermost = max(len(complaint.keys) for complaint in found)
    first, *others = [complaint for complaint in found if len(complaint.keys) == innermost]
    same = [first, *(other for other in others if other.keys == first.keys)]
    of_all = next((complaint.types for complaint in same if len(complaint.types) > 1), first.types)
    types = dict.fromkeys(name for text in of_all for name in _names(text))
    if not types or list(types) == ["null"] or any(complaint.is_of_class for complaint in same):
        return None
    # Of a list that is wrong in an entry, the whole of it is told last.
    value = next((complaint.value for complaint in reversed(same) if complaint.value is not None), None)
    got = "" if value is None else f", got {_quoted(value)}"
    key = ".".join(first.keys)
    return Mistake(f"--{key}: expected {_listed(list(types))}{got}", key)


def _complaints(message: str) -> Iterator[_Complaint]:
    """Line by line what was expected, or given, with the keys around it."""
    around: list[tuple[int, str]] = []  # indentation of a key, and it
    is_below_class = False
    for line in message.splitlines():
        text = line.strip().removeprefix("- ")
        indentation = len(line) - len(line.lstrip())
        if not text:
            continue
        around = [(place, key) for place, key in around if place < indentation]
        around += [(indentation, key) for key in _KEY.findall(text)]
        keys = tuple(key for _, key in around)
        if is_below_class and not _KEY.search(text):
            yield _Complaint(keys, [], None, is_of_class=True)
        is_below_class = _PROBLEM.match(text) is not None
        text = text.partition(_AROUND)[0]
        if given := _SUBTYPES.match(text):
            yield _Complaint(keys, _COMMA.split(given[1]), None)
        elif text.startswith(_GIVEN):
            yield _Complaint(keys, [], text.removeprefix(_GIVEN))
        elif (expected := _EXPECTED.match(text)) and not expected[1].startswith(_NO_TYPE):
            yield _Complaint(keys, [expected[1]], expected[2])


def _names(text: str) -> Iterator[str]:
    """A type as a recipe has its values: ``int``, ``null``; of a literal, the values themselves."""
    if text.startswith("typing.Literal["):
        yield from text.removeprefix("typing.Literal[").removesuffix("]").split(", ")
        return
    name = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text)
    yield {"NoneType": "null"}.get(name, re.sub(r"\b(?:\w+\.)+", "", name))


def _quoted(value: str) -> str:
    short = textwrap.shorten(value, _LONGEST, placeholder=" ...")
    return f"'{short}'" if re.fullmatch(r"[\w ]*", value) else short


def _listed(names: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
