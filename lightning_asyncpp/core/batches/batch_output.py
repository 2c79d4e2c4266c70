"""What the user's step returned for the micro-batches of a batch, and what is said where nothing counts in it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_asyncpp.core.batches.tree import map_tensors, merge_outputs
from lightning_asyncpp.core.batches.user_hooks import loss_of
from lightning_asyncpp.core.host_copies import Reading


@dataclass(frozen=True)
class BatchOutput:
    """What the last stage has to show for a batch.

    Attributes:
        results: what the user's step returned for each micro-batch that had samples.
        weights: their weights.
    """

    results: list[Any]
    weights: list[float]

    def mean_loss(self, reduction: str = "mean") -> Tensor | None:
        """Weighted mean of the losses, without those that are NaN where others are not; None without samples."""
        total = sum(self.weights)
        if not total:
            return None
        losses = self._losses()
        missing = losses.isnan()
        if reduction == "mean":
            losses = losses * self._counting(losses.dtype, losses.device)
        mean = losses.sum() / total
        others = losses.masked_fill(missing, 0.0).sum() / (total - self._weight_of(missing)).to(losses.dtype)
        return torch.where(missing.any(), others, mean)  # asking whether any is NaN would wait for the device

    def nan_losses(self) -> tuple[Tensor, Tensor] | None:
        """Weight of the micro-batches whose loss is NaN, and which is the first of them, from 1; None without samples.

        Both stay on the device; they are 0 where no loss is NaN.
        """
        if not sum(self.weights):
            return None
        missing = self._losses().isnan()
        return self._weight_of(missing), missing.any() * (missing.int().argmax() + 1)

    def _losses(self) -> Tensor:
        """Losses of the micro-batches that have a weight."""
        return torch.stack([loss_of(result).detach() for result, w in zip(self.results, self.weights) if w])

    def _counting(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        weights = torch.tensor([weight for weight in self.weights if weight], dtype=dtype, device="cpu")
        return weights.to(device, non_blocking=True)

    def _weight_of(self, chosen: Tensor) -> Tensor:
        dtype = torch.float32 if chosen.device.type == "mps" else torch.float64
        return (self._counting(dtype, chosen.device) * chosen).sum()

    def beside_loss(self) -> dict[str, Any]:
        """What a training step returned beside its loss, for the whole batch."""
        beside = [{k: v for k, v in r.items() if k != "loss"} for r in self.results if isinstance(r, Mapping)]
        return merge_outputs(map_tensors(Tensor.detach, beside), self.weights) if any(beside) else {}


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


def or_nan(loss: Tensor | None, device: torch.device) -> Tensor:
    """The mean loss of a batch; NaN for a batch without samples, which has none."""
    return torch.full((), float("nan"), device=device) if loss is None else loss


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
