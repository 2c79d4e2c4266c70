"""What every stage knows of the whole model: found before it is cut, when all of it is still there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_asyncpp.pipeline.statistics import StatisticsLayout, counting_problems
from lightning_asyncpp.pipeline.ties import Tie, find_ties
from lightning_asyncpp.pipeline.units import Unit, has_parameters


@dataclass(frozen=True)
class WholeModel:
    """Facts of a model that all stages agree on.

    Attributes:
        counts: number of units on each stage.
        has_parameters: of every unit, whether it holds some.
        ties: parameters that several stages share.
        statistics: the layers that count, and where their counts stand in the control message.
    """

    counts: tuple[int, ...] = ()
    has_parameters: tuple[bool, ...] = ()
    ties: tuple[Tie, ...] = ()
    statistics: StatisticsLayout = field(default_factory=StatisticsLayout)

    @classmethod
    def of(cls, units: Sequence[Unit], counts: Sequence[int]) -> tuple[WholeModel, list[str]]:
        """The facts, and problems with what stages share.

        Args:
            units: of the whole model.
            counts: number of them on each stage.
        """
        ties, problems = find_ties(units, counts)
        problems += counting_problems(units, counts)
        heavy = tuple(map(has_parameters, units))
        return cls(tuple(counts), heavy, tuple(ties), StatisticsLayout(units)), problems
