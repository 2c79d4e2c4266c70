"""What every stage knows of the whole model: found before it is cut, when all of it is still there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import nn

from lightning_asyncpp.pipeline.cut.statistics import StatisticsLayout, counting_problems
from lightning_asyncpp.pipeline.cut.ties import Tie, find_ties
from lightning_asyncpp.pipeline.cut.units import Unit, has_parameters

T = TypeVar("T")


@dataclass(frozen=True)
class WholeModel:
    """Facts of a model that all stages agree on.

    Attributes:
        counts: number of units on each stage.
        has_parameters: of every unit, whether it holds some.
        ties: parameters that several stages share.
        statistics: the layers that count, and where their counts stand in the control message.
        shared_names: name of a parameter that several layers have -> all of them.
        same: for every parameter that has several names in the root, all of them: entries that a checkpoint must have
            equal.
    """

    counts: tuple[int, ...] = ()
    has_parameters: tuple[bool, ...] = ()
    ties: tuple[Tie, ...] = ()
    statistics: StatisticsLayout = field(default_factory=StatisticsLayout)
    shared_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    same: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def of(
        cls, units: Sequence[Unit], counts: Sequence[int], root: nn.Module | None = None
    ) -> tuple[WholeModel, list[str]]:
        """The facts, and problems with what stages share.

        Args:
            units: of the whole model.
            counts: number of them on each stage.
            root: what checkpoints hold: the model, or the module around it.
        """
        ties, problems = find_ties(units, counts), counting_problems(units, counts)
        heavy = tuple(map(has_parameters, units))
        same = () if root is None else _same(root)
        return cls(tuple(counts), heavy, tuple(ties), StatisticsLayout(units), _shared_names(units), same), problems

    def find(self, values: Mapping[str, T], name: str) -> T | None:
        """The value of a parameter, under this name of it or another one that another cut knows it by; or None."""
        if name in values:
            return values[name]
        return next((values[other] for other in self.shared_names.get(name, ()) if other in values), None)


def _same(root: nn.Module) -> tuple[tuple[str, ...], ...]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return tuple(tuple(several) for several in names.values() if len(several) > 1)


def _shared_names(units: Sequence[Unit]) -> dict[str, tuple[str, ...]]:
    names: dict[int, list[str]] = {}
    for unit in units:
        for name, parameter in unit.module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(f"{unit.name}.{name}")
    return {name: tuple(several) for several in names.values() if len(several) > 1 for name in several}
