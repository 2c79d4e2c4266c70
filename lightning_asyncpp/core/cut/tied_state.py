"""Shared parameters in checkpoints, where they count once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from lightning_asyncpp.errors import ConfigurationError


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
