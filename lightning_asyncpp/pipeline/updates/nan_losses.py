"""Batches in which nothing counts: a loss that is NaN while its gradient is not, and mini-batches without weight."""

from __future__ import annotations

import warnings

from torch import Tensor

from lightning_asyncpp.pipeline.wire.reading import Reading


def nan_loss_text(mini_batch: int, place: int) -> str:
    """What to tell the user, once.

    Args:
        mini_batch: index of the mini-batch.
        place: which of its micro-batches that have a weight it is, counted from 1.
    """
    return (
        f"mini-batch {mini_batch}: the loss of micro-batch {place - 1} was NaN, its gradient was not. A mean over no"
        " target does that (labels that are all -100). Such a micro-batch is left out of the loss and of other means"
        " that are logged, but not of the update, in which the others count for less than in a mean over the whole"
        " batch. Define micro_batch_weight(micro_batch) on the module (in Fabric, give it to the strategy), which"
        " returns how many targets count: the update is then that of the whole batch, and 0 leaves a micro-batch out."
        " This is said once"
    )


def no_weight_text(mini_batch: int) -> str:
    """What to tell the user, once, of a mini-batch that counts for nothing.

    Args:
        mini_batch: its index.
    """
    return (
        f"mini-batch {mini_batch}: micro_batch_weight returned 0 for all of its micro-batches, so it has no update."
        " That is right where they hold nothing but padding; else look at what the weight counts. This is said once"
    )


class NanLosses:
    """Remembers NaN losses until their update has shown whether the gradient was finite, and warns once."""

    def __init__(self) -> None:
        self._places: dict[int, list[Reading]] = {}
        self._told = False

    def take(self, mini_batch: int, place: Tensor | None) -> None:
        """Remember where the first NaN is, counted from 1, 0 for none; nobody waits for the device here."""
        if place is not None and not self._told:
            self._places.setdefault(mini_batch, []).append(Reading([place]))

    def updated(self, mini_batch: int, finite: bool) -> None:
        """The gradient of a mini-batch is known."""
        places = [int(reading.get()[0][0]) for reading in self._places.pop(mini_batch, [])]
        if finite and any(places) and not self._told:
            self._told = True
            warnings.warn(nan_loss_text(mini_batch, next(filter(None, places))), stacklevel=2)
