"""What a run is, in plain values: its ranks compare it when they start, its checkpoints carry it, a resume reads it.

It has sections (``"versions"``, ``"strategy"``, ``"optimizer"``, ...) of named values. A name that one side lacks is
not compared: what is not known is no difference.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from enum import Enum
from typing import Any

import numpy as np
from torch import Tensor

MANIFEST = "manifest"
"""Entry of a checkpoint's state of a strategy in which it is."""
Section = Mapping[str, Any]
_MOST_CHARACTERS = 2**16  # of one value
_LEVELS = 20  # of values in each other, which may also hold themselves
_NOTHING = object()


@dataclass
class Manifest:
    """The identity of a run.

    Attributes:
        run: a name of the run, which goes with it through all its resumes.
        attempt: 1, and one more with every resume.
        sections: name -> values as JSON has them.
    """

    run: str = field(default_factory=lambda: secrets.token_hex(4))
    attempt: int = 1
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)

    def keep(self, name: str, section: Section) -> dict[str, Any]:
        """Keep what is plain of a section, and return it."""
        kept = {key: value for key, given in section.items() if (value := _plain_or_nothing(given)) is not _NOTHING}
        self.sections[name] = kept
        return kept

    def as_plain(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)

    @classmethod
    def of_plain(cls, saved: Any) -> Manifest | None:
        """What :meth:`as_plain` returned; None of anything else, such as what an older release wrote."""
        if not isinstance(saved, Mapping) or not isinstance(saved.get("sections"), Mapping):
            return None
        sections = {str(name): plain(part) for name, part in saved["sections"].items() if isinstance(part, Mapping)}
        attempt = saved.get("attempt")
        return cls(str(saved.get("run", "")), attempt if type(attempt) is int else 1, sections)


def plain(value: Any, levels: int = _LEVELS) -> Any:
    """A value as JSON has it, of Python's own types, which checkpoints hold; ``plain(object())`` of what is none.

    Args:
        value: anything.
        levels: how many containers in each other are looked into.
    """
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, (Tensor, np.generic)):
        value = _NOTHING if isinstance(value, Tensor) and (value.numel() != 1 or value.is_meta) else value.item()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):  # of a class that is derived from one, too
        if isinstance(value, kind):
            return getattr(kind, f"__{kind.__name__}__")(_shortened(value) if isinstance(value, str) else value)
    if levels and isinstance(value, Mapping):
        return {str(k): found for k, child in value.items() if (found := plain(child, levels - 1)) is not _NOTHING}
    if levels and isinstance(value, (list, tuple)):
        return [found for child in value if (found := plain(child, levels - 1)) is not _NOTHING]
    return _NOTHING


def _plain_or_nothing(value: Any) -> Any:
    try:
        return plain(value)
    except Exception:  # of a container of somebody else's, such as one that looks its values up
        return _NOTHING


def _shortened(text: str) -> str:
    """A text, of a very long one the beginning and a digest."""
    if len(text) <= _MOST_CHARACTERS:
        return text
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    return f"{text[:_MOST_CHARACTERS]}\n... {len(text)} characters of SHA-256 {digest[:16]}"


def text_of(value: Any) -> str:
    """The same text for equal values, on every machine."""
    return json.dumps(value, sort_keys=True)


def changes(before: Section, now: Section) -> Iterator[tuple[str, str, str]]:
    """What both sides name and do not agree in: the name, and both values in words."""
    for name in now:
        if name in before and text_of(before[name]) != text_of(now[name]):
            old, new = in_words([before[name], now[name]])
            yield name, old, new


def in_words(values: Sequence[Any]) -> list[str]:
    """Values that differ, for a message; of long texts the first line in which they do."""
    if not (all(isinstance(value, str) for value in values) and any("\n" in value for value in values)):
        return [repr(value) for value in values]
    lines = [value.splitlines() for value in values]
    longest = max(map(len, lines))
    filled = [[*text, *[""] * (longest - len(text))] for text in lines]
    first = next((row for row in zip(*filled) if len(set(row)) > 1), [""] * len(values))
    return [repr(line.strip()) for line in first]
