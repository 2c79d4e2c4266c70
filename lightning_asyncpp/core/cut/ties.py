"""Ties: parameters that layers of several stages share, such as the weights of a tied embedding and head.

Each of these stages has a copy of the parameter. All copies are updated with the same gradient; see
:mod:`lightning_asyncpp.core.updates.reduction`. A checkpoint stores the parameter once.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_asyncpp.core.cut.units import Unit
from lightning_asyncpp.errors import ConfigurationError


class Tie(NamedTuple):
    """Parameter that several stages share.

    Attributes:
        stages: indices of the stages, in order.
        names: name of the parameter in the model on each of these stages.
    """

    stages: tuple[int, ...]
    names: tuple[str, ...]

    def name_on(self, stage: int) -> str:
        """Return the name of the parameter on a stage."""
        return self.names[self.stages.index(stage)]

    def prev_sharing(self, stage: int) -> int | None:
        """Return the previous stage that shares the parameter; None for the first."""
        position = self.stages.index(stage)
        return self.stages[position - 1] if position else None

    def next_sharing(self, stage: int) -> int | None:
        """Return the next stage that shares the parameter; None for the last."""
        return next(iter(self.stages[self.stages.index(stage) + 1 :]), None)


def find_ties(units: Sequence[Unit], counts: Sequence[int]) -> list[Tie]:
    """Return the parameters that layers of several stages share.

    Args:
        units: units (parts between two possible cuts) of the whole model, before it is cut.
        counts: number of units on each stage.
    """
    stages = [stage for stage, count in enumerate(counts) for _ in range(count)]
    holders: dict[nn.Parameter, dict[int, str]] = {}
    for unit, stage in zip(units, stages):
        for name, parameter in unit.module.named_parameters():
            holders.setdefault(parameter, {}).setdefault(stage, unit.path(name))
    return [Tie(tuple(names), tuple(names.values())) for names in holders.values() if len(names) > 1]


def trained_on(stage: int, ties: Sequence[Tie], trained: Container[str]) -> list[Tie]:
    """Return those ties of a stage whose parameter is trained.

    Args:
        stage: index of the stage.
        ties: ties of the whole model.
        trained: names of the stage's trained parameters.
    """
    return [tie for tie in ties if stage in tie.stages and tie.name_on(stage) in trained]


def names_on(stage: int, ties: Sequence[Tie]) -> frozenset[str]:
    """Return the names of a stage's parameters that it shares with other stages."""
    return frozenset(tie.name_on(stage) for tie in ties if stage in tie.stages)


def clip_groups_on(stage: int, ties: Sequence[Tie], names: Iterable[str]) -> list[list[str]]:
    """Divide the names of a stage's parameters by the set of stages that have them.

    Args:
        stage: index of the stage.
        ties: ties of the stage, in the order of the whole model, which the names of shared parameters then have.
        names: names of all parameters of the stage.
    """
    groups: dict[tuple[int, ...], list[str]] = {}
    for tie in ties:
        groups.setdefault(tie.stages, []).append(tie.name_on(stage))
    tied = names_on(stage, ties)
    return [[name for name in names if name not in tied], *groups.values()]


def first_sharing(stage: int, ties: Sequence[Tie]) -> int | None:
    """Return the first stage of a stage's group; None if the stage shares no parameter.

    Stages are in one group if they share a parameter, or if a chain of shared parameters links them. Frozen parameters
    count, since they may be trained later.
    """
    together, shared = {stage}, [set(tie.stages) for tie in ties]
    while more := [stages for stages in shared if together & stages and not stages <= together]:
        together = together.union(*more)
    return min(together) if len(together) > 1 else None


def keep_once(state: dict[str, Any], same: Iterable[Sequence[str]]) -> None:
    """Make all names of a shared parameter refer to the same tensor, so that a file stores it once.

    Args:
        state: name -> tensor of the whole model, changed in place; missing names are ignored.
        same: for each shared parameter, its names.
    """
    for names in same:
        present = [name for name in names if name in state]
        state.update((other, state[present[0]]) for other in present[1:])


def check_copies(state: Mapping[str, Any], same: Iterable[Sequence[str]]) -> None:
    """Check that all names of a shared parameter have the same value.

    Args:
        state: name -> tensor of the whole model.
        same: for each shared parameter, its names.

    Raises:
        ConfigurationError: two names of a parameter have different values.
    """
    present = [[name for name in names if name in state] for names in same]
    pairs = [(names[0], other) for names in present for other in names[1:]]
    problems = [
        f"{first} and {other} are one parameter in this model, but differ in the checkpoint, which comes from a model"
        " that does not share them; build the model without sharing (for a GPT: tie_embeddings=False), or set both to"
        " the same value"
        for first, other in pairs
        if state[first] is not state[other] and not torch.equal(state[first], state[other])
    ]
    if problems:
        raise ConfigurationError.from_problems(problems)
