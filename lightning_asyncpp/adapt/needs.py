"""What the code around a model's blocks needs of what came before it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from lightning_asyncpp.adapt.packing import Output


class Needs(NamedTuple):
    """Outputs of blocks, numbers of submodules' calls, and numbers of the call's tensors."""

    outputs: frozenset[Output] = frozenset()
    calls: frozenset[int] = frozenset()
    inputs: frozenset[int] = frozenset()

    def __or__(self, other: Needs) -> Needs:
        return Needs(self.outputs | other.outputs, self.calls | other.calls, self.inputs | other.inputs)

    def __and__(self, other: Needs) -> Needs:
        return Needs(self.outputs & other.outputs, self.calls & other.calls, self.inputs & other.inputs)

    def __sub__(self, other: Needs) -> Needs:
        return Needs(self.outputs - other.outputs, self.calls - other.calls, self.inputs - other.inputs)

    def singly(self) -> list[Needs]:
        """Each of them alone."""
        return [
            *(Needs(outputs=frozenset({one})) for one in self.outputs),
            *(Needs(calls=frozenset({one})) for one in self.calls),
            *(Needs(inputs=frozenset({one})) for one in self.inputs),
        ]

    @staticmethod
    def union(several: Iterable[Needs]) -> Needs:
        """All of several."""
        found = Needs()
        for one in several:
            found = found | one
        return found
