"""Parameters that layers of several stages share, such as the matrix of a tied embedding and head.

Each of these stages holds a copy and steps it by itself, with the same gradient:
:mod:`lightning_asyncpp.core.updates.reduction`. In a checkpoint they count once.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_asyncpp.core.cut.units import Unit
from lightning_asyncpp.errors import ConfigurationError


class Tie(NamedTuple):
    """A parameter that several stages hold.

    Attributes:
        stages: those, in order.
        names: its name in the model on each of them.
    """

    stages: tuple[int, ...]
    names: tuple[str, ...]

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
    stages = [stage for stage, count in enumerate(counts) for _ in range(count)]
    holders: dict[nn.Parameter, dict[int, str]] = {}
    for unit, stage in zip(units, stages):
        for name, parameter in unit.module.named_parameters():
            holders.setdefault(parameter, {}).setdefault(stage, unit.path(name))
    return [Tie(tuple(names), tuple(names.values())) for names in holders.values() if len(names) > 1]


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


def keep_once(state: dict[str, Any], same: Iterable[Sequence[str]]) -> dict[str, Any]:
    """Let all names of every shared parameter stand for the same tensor, which a file then holds once.

    Args:
        state: name -> tensor, of the whole model; it is changed in place. Names that it lacks are left alone.
        same: names of a parameter, for each.
    """
    for names in same:
        present = [name for name in names if name in state]
        state.update((other, state[present[0]]) for other in present[1:])
    return state


def check_copies(state: Mapping[str, Any], same: Iterable[Sequence[str]]) -> None:
    """Refuse weights to load in which two names of a parameter have other values.

    Args:
        state: name -> tensor, of the whole model.
        same: names of a parameter, for each.

    Raises:
        ConfigurationError: naming them.
    """
    present = [[name for name in names if name in state] for names in same]
    pairs = [(names[0], other) for names in present for other in names[1:]]
    problems = [
        f"{first} and {other} are one parameter in this model, but differ in the checkpoint: it was written by a model"
        " that does not share them; build the model so (for a GPT: tie_embeddings=False), or give both the value that"
        " counts"
        for first, other in pairs
        if state[first] is not state[other] and not torch.equal(state[first], state[other])
    ]
    if problems:
        raise ConfigurationError.from_problems(problems)
