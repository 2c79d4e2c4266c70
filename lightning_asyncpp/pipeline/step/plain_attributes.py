"""Numbers, switches and names that a model keeps in attributes, or in configurations that it refers to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

PLAIN = (bool, int, float, str, type(None))
_MOST_ENTRIES = 256  # of a configuration


class _Place(NamedTuple):
    """Where a value is kept, and how messages call it."""

    kept_in: Any
    key: Any
    name: str


class PlainAttributes:
    """Tells which attribute of some modules was changed between two moments.

    Args:
        modules: name -> module.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._places: list[_Place] = []
        self._values: list[Any] = []

    def find(self) -> None:
        """Look for attributes; what is new since the last time is noticed from now on."""
        seen: set[int] = set()
        self._places = [
            place
            for path, module in self._modules.items()
            for key, value in vars(module).items()
            if key != "training" and not key.startswith("_")
            for place in _places_of(vars(module), key, f"{path}.{key}" if path else key, value, seen)
        ]

    def remember(self) -> None:
        """Take what is there now as it was before."""
        self._values = self._read()

    def changed(self) -> str | None:
        """The name of an attribute that has another value than it had; None if there is none."""
        values = self._read()
        if values == self._values:
            return None
        pairs = zip(self._places, values, self._values)
        return next((place.name for place, now, before in pairs if now is not before and now != before), None)

    def _read(self) -> list[Any]:
        return [kept_in.get(key) for kept_in, key, _ in self._places]


def _places_of(kept_in: dict[str, Any], key: str, name: str, value: Any, seen: set[int]) -> Iterator[_Place]:
    if isinstance(value, PLAIN):
        yield _Place(kept_in, key, name)
        return
    if isinstance(value, (nn.Module, Tensor, type)) or callable(value) or id(value) in seen:
        return
    seen.add(id(value))
    entries = _entries(value)
    if entries is not None and len(entries) <= _MOST_ENTRIES:
        yield from (_Place(entries, k, f"{name}[{k!r}]") for k, v in entries.items() if isinstance(v, PLAIN))


def _entries(value: Any) -> Any:
    """The entries of a mutable configuration: of a mapping, a list, or an object with attributes."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, list):
        return _ListEntries(value)
    return vars(value) if hasattr(value, "__dict__") else None


class _ListEntries(Mapping):
    """A list as a mapping from positions."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = values

    def __getitem__(self, position: int) -> Any:
        if position < len(self._values):
            return self._values[position]
        raise KeyError(position)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._values)))

    def __len__(self) -> int:
        return len(self._values)
