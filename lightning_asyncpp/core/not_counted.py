"""What is told where a micro-batch or a mini-batch counts for nothing."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from lightning_asyncpp.core.host_copies import Reading


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
    """Warns of NaN losses whose gradient is finite, once."""

    def __init__(self) -> None:
        self._told = False

    def updated(self, mini_batch: int, places: Iterable[Reading], finite: bool) -> None:
        """The gradient of a mini-batch is known.

        Args:
            mini_batch: its index.
            places: of each of its batches the first micro-batch whose loss is NaN, counted from 1; 0 for none.
            finite: whether the gradient is.
        """
        if not finite or self._told:
            return
        if found := [place for reading in places if (place := int(reading.get()[0][0]))]:
            self._told = True
            warnings.warn(nan_loss_text(mini_batch, found[0]), stacklevel=2)
