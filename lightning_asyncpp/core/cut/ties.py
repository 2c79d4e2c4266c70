"""Parameters that layers of several stages share, such as the matrix of a tied embedding and head.

Each of these stages holds a copy and steps it by itself, with the same gradient:
:mod:`lightning_asyncpp.core.updates.tied_gradients`.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

from torch import nn

from lightning_asyncpp.core.cut.units import Unit, first_names


class Tie(NamedTuple):
    """A parameter that several stages hold.

    Attributes:
        stages: those, in order.
        names: its name in the model on each of them.
        is_trained: whether it was to be trained when the model was cut; between two trainings that may change.
    """

    stages: tuple[int, ...]
    names: tuple[str, ...]
    is_trained: bool = True

    def name_on(self, stage: int) -> str:
        """Its name on one of the stages."""
        return self.names[self.stages.index(stage)]

    def before(self, stage: int) -> int | None:
        """The next one of them towards the first stage, if there is one."""
        position = self.stages.index(stage)
        return self.stages[position - 1] if position else None

    def behind(self, stage: int) -> int | None:
        """The next one of them towards the last stage, if there is one."""
        return next(iter(self.stages[self.stages.index(stage) + 1 :]), None)


def find_ties(units: Sequence[Unit], counts: Sequence[int]) -> list[Tie]:
    """Parameters that layers of several stages share.

    Args:
        units: of the whole model, before it is cut.
        counts: number of units on each stage.
    """
    holders = first_names(units, counts, nn.Module.named_parameters)
    return [
        Tie(tuple(names), tuple(names.values()), parameter.requires_grad)
        for parameter, names in holders.items()
        if len(names) > 1
    ]


def trained_on(stage: int, ties: Sequence[Tie], trained: Container[str]) -> list[Tie]:
    """The ties of a stage whose parameter is now trained.

    Args:
        stage: the stage.
        ties: of the whole model.
        trained: names of the stage's parameters that are.
    """
    return [tie for tie in ties if stage in tie.stages and tie.name_on(stage) in trained]


def names_on(stage: int, ties: Sequence[Tie]) -> frozenset[str]:
    """Names of the parameters of a stage that it shares with another."""
    return frozenset(tie.name_on(stage) for tie in ties if stage in tie.stages)


def first_sharing(stage: int, ties: Sequence[Tie]) -> int | None:
    """The first of the stages that share parameters with a stage, or with one that does; None if none does.

    Frozen ones count: they may be trained later.
    """
    together, shared = {stage}, [set(tie.stages) for tie in ties]
    while more := [stages for stages in shared if together & stages and not stages <= together]:
        together = together.union(*more)
    return min(together) if len(together) > 1 else None
