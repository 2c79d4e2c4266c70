"""What the user decides about batches and losses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from lightning_asyncpp.core.batches.micro_batch import number_of_samples, split_batch

Step = Callable[[Any, float | None], Any]
"""The user's step, called with a micro-batch and its weight; None where it is left at its call of the model."""
_BY_NAME = ("split_batch", "micro_batch_weight", "loss_reduction")


def problems_of_reduction(loss_reduction: object) -> list[str]:
    """What is wrong with how a step is said to reduce its losses."""
    return [] if loss_reduction in ("mean", "sum") else [f"loss_reduction={loss_reduction!r} must be 'mean' or 'sum'"]


@dataclass(frozen=True)
class UserHooks:
    """What the user's module decides about batches and losses.

    Attributes:
        split_batch: (batch, parts) -> that many micro-batches, ``None`` for an empty slot.
        micro_batch_weight: micro-batch -> its weight w_k in the mini-batch's mean loss.
        loss_reduction: ``"mean"`` if the step returns the mean over the micro-batch's weight, ``"sum"`` if the sum.
        forward_context: entered around every forward, for the precision.
        context_around_step: whether it covers the whole step of the user, or the layers of the model alone.
        model_name: how the user calls the model, for messages.
    """

    split_batch: Callable[[Any, int], list[Any]] = split_batch
    micro_batch_weight: Callable[[Any], float] = number_of_samples
    loss_reduction: str = "mean"
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
    context_around_step: bool = True
    model_name: str = "self.model"

    @classmethod
    def of(cls, module: object, **others: Any) -> UserHooks:
        """The user's hooks: the module's attributes of those names, else the defaults.

        Args:
            module: may have ``split_batch``, ``micro_batch_weight`` and ``loss_reduction``.
            **others: the other attributes.
        """
        own = {name: getattr(module, name) for name in _BY_NAME if hasattr(module, name)}
        return cls(**own, **others)
