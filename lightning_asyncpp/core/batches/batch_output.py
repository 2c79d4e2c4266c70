"""What the user's step returned for the micro-batches of a batch, and what is said where nothing counts in it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_asyncpp.core.batches.tree import map_tensors, merge_outputs
from lightning_asyncpp.core.host_copies import Reading
from lightning_asyncpp.errors import ConfigurationError


@dataclass(frozen=True)
class BatchOutput:
    """What the last stage has to show for a batch.

    Attributes:
        results: what the user's step returned for each micro-batch that had samples.
        weights: their weights.
    """

    results: list[Any]
    weights: list[float]

    @property
    def weight(self) -> float:
        """What the batch weighs."""
        return sum(self.weights)

    @cached_property
    def _losses(self) -> Tensor | None:
        """Losses of the micro-batches that have a weight; None without any."""
        losses = [loss_of(result).detach() for result, weight in zip(self.results, self.weights) if weight]
        return torch.stack(losses) if losses else None

    def mean_loss(self, reduction: str = "mean") -> Tensor | None:
        """Weighted mean of the losses, without those that are NaN where others are not; None without samples."""
        losses = self._losses
        if losses is None:
            return None
        missing, device, total = losses.isnan(), losses.device, sum(self.weights)
        dtype = torch.float32 if device.type == "mps" else torch.float64
        weights = torch.tensor([weight for weight in self.weights if weight], dtype=dtype, device="cpu")
        weights = weights.to(device, non_blocking=True)
        if reduction == "mean":
            losses = losses * weights.to(losses.dtype)
        others = losses.masked_fill(missing, 0.0).sum() / (total - (weights * missing).sum()).to(losses.dtype)
        return torch.where(missing.any(), others, losses.sum() / total)  # to ask if any is NaN would wait for a GPU

    @property
    def first_nan(self) -> Tensor | None:
        """Which micro-batch with a weight is the first whose loss is NaN, from 1, or 0; None without samples."""
        if self._losses is None:
            return None
        missing = self._losses.isnan()
        return missing.any() * (missing.int().argmax() + 1)

    def beside_loss(self) -> dict[str, Any]:
        """What a training step returned beside its loss, for the whole batch."""
        if not self.results or not isinstance(self.results[0], Mapping):
            return {}
        beside = [{k: v for k, v in r.items() if k != "loss"} for r in self.results if isinstance(r, Mapping)]
        return merge_outputs(map_tensors(Tensor.detach, beside), self.weights) if any(beside) else {}


def loss_of(result: Any) -> Tensor:
    """Return the loss of a training step: the tensor itself, or the entry ``"loss"``.

    Raises:
        ConfigurationError: there is none, or it is not a single number.
    """
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(type(loss).__name__)
        if isinstance(result, Mapping):
            what = f"a dict with the keys {list(result)}" if "loss" not in result else f"{what} there"
        mend = "" if result is not None else (
            "; to leave a batch out return a loss of 0, such as 0.0 * self.model(...).sum(): weights stay as they are"
            " but for momentum and decay"
        )  # fmt: skip
        raise ConfigurationError(
            f"training_step must return a loss of one element, or a dict with one under 'loss'; got {what}{mend}"
        )
    return loss.reshape(()) if loss.ndim else loss


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
