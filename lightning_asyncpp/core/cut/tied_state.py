"""Shared parameters in checkpoints, where they count once, and in optimizers, which must treat all copies alike."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_asyncpp.core.cut.ties import Tie
from lightning_asyncpp.core.ranks.agreement import exchange
from lightning_asyncpp.core.ranks.mesh import Mesh
from lightning_asyncpp.errors import ConfigurationError

_NOT_OPTIONS = ("params", "param_names")
_TRAINED = "requires_grad"


class CopiesDifferError(RuntimeError):
    """The copies of a shared parameter are no longer equal."""


def keep_once(state: dict[str, Any], same: Iterable[Sequence[str]]) -> dict[str, Any]:
    """Let all names of every shared parameter stand for the same tensor, which a file then holds once.

    Args:
        state: name -> tensor, of the whole model; it is changed in place. Names that it lacks are left alone.
        same: names of a parameter, for each.

    Raises:
        CopiesDifferError: the copies are not equal.
    """
    for names in same:
        present = [name for name in names if name in state]
        for other in present[1:]:
            if state[other] is not state[present[0]] and not torch.equal(state[present[0]], state[other]):
                raise CopiesDifferError(
                    f"{present[0]} and {other} are one parameter, but their copies on two stages differ: something"
                    " changed one of them outside the optimizer, or the optimizer treats them differently"
                )
            state[other] = state[present[0]]
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


def tied_group_problems(
    mesh: Mesh, ties: Sequence[Tie], parameters: Mapping[str, Tensor], optimizer: Optimizer
) -> list[str]:
    """Shared parameters whose copies would be stepped differently; a blocking collective.

    Args:
        mesh: this rank's place.
        ties: of the whole model, the same on all ranks; without any nothing is exchanged.
        parameters: name -> parameter of this stage.
        optimizer: of this stage.
    """
    if not ties:
        return []
    own = {tie.names[0]: _options(parameters[tie.name_on(mesh.stage)], optimizer) for tie in _own(mesh, ties)}
    by_stage: dict[int, dict[str, dict[str, str]]] = {}
    for text in exchange(mesh, json.dumps([mesh.stage, own])):
        stage, options = json.loads(text)
        by_stage[stage] = options
    return [problem for tie in ties for problem in _problems(tie, by_stage)]


def _own(mesh: Mesh, ties: Sequence[Tie]) -> list[Tie]:
    return [tie for tie in ties if mesh.stage in tie.stages]


def _options(parameter: Tensor, optimizer: Optimizer) -> dict[str, str]:
    """What the optimizer's group says about a parameter, as text; its class counts too, and whether it is trained."""
    kind = {"optimizer": type(optimizer).__name__, _TRAINED: repr(parameter.requires_grad)}
    for group in optimizer.param_groups:
        if any(p is parameter for p in group["params"]):
            return kind | {name: repr(value) for name, value in group.items() if name not in _NOT_OPTIONS}
    return kind | {"held": "no"}


def _problems(tie: Tie, by_stage: Mapping[int, Mapping[str, Mapping[str, str]]]) -> list[str]:
    first, *others = (by_stage[stage][tie.names[0]] for stage in tie.stages)
    if all(options[_TRAINED] == repr(False) for options in (first, *others)):
        return []
    for stage, name, options in zip(tie.stages[1:], tie.names[1:], others):
        if differing := sorted(key for key in first.keys() | options.keys() if first.get(key) != options.get(key)):
            values = "; ".join(f"{key}: {first.get(key)} and {options.get(key)}" for key in differing)
            return [
                f"{tie.names[0]} (stage {tie.stages[0]}) and {name} (stage {stage}) are one parameter, but the"
                f" optimizer treats them differently ({values}): their copies would drift apart; put both names into"
                " groups with the same options, and freeze or train both"
            ]
    return []
