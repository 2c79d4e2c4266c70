"""What wrote a checkpoint, told to who was given one that it cannot go on from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

PIPELINE = "pipeline"
"""Entry of a checkpoint in which a pipeline keeps what is neither weights nor optimizer."""
DELAYED_GRADIENT = "delayed_gradient"
"""The same of an emulated delay."""

TRAINER, FABRIC, WEIGHTS = "Trainer", "Fabric", "weights"
_VERSION_OF_LIGHTNING = "pytorch-lightning_version"


class Origin(NamedTuple):
    """Who wrote a checkpoint.

    Attributes:
        writer: ``TRAINER``; ``FABRIC``, under a strategy of ours; ``WEIGHTS`` if it holds nothing else; or ``""``.
        strategy: of ours that it was written under: ``PIPELINE``, ``DELAYED_GRADIENT``, or ``""``.
        description: the same in words, and what reads it.
    """

    writer: str
    strategy: str
    description: str


def origin_of(content: Any) -> Origin:
    """Tell who wrote a checkpoint.

    Args:
        content: all that the file holds.
    """
    if not isinstance(content, Mapping):
        return Origin("", "", f"is no checkpoint: it holds a {type(content).__name__}")
    strategy = next((name for name in (PIPELINE, DELAYED_GRADIENT) if name in content), "")
    under = _in_words(strategy, content.get(strategy))
    entries = ", ".join(map(str, list(content)[:6])) + (", ..." if len(content) > 6 else "")
    if _VERSION_OF_LIGHTNING in content:
        reader = "trainer.fit(module, ckpt_path=...) goes on from it"
        return Origin(TRAINER, strategy, f"was written by a Trainer{under}: {reader}")
    if strategy:
        reader = f"fabric.load goes on from it, with the entries that were saved ({entries})"
        return Origin(FABRIC, strategy, f"was written by fabric.save{under}: {reader}")
    if content and all(isinstance(value, Tensor) for value in content.values()):
        return Origin(WEIGHTS, "", f"holds weights alone ({entries}): load_state_dict or fabric.load_raw reads it")
    return Origin("", "", f"was written neither by a Trainer nor by fabric.save under a strategy of ours ({entries})")


def _in_words(strategy: str, state: Any) -> str:
    if strategy == PIPELINE:
        stages = state.get("num_stages") if isinstance(state, Mapping) else None
        return f" from a pipeline of {stages} stages"
    return " under delayed_gradient" if strategy else ""
