"""Auxiliary losses of layers, and counts from which layers learn without a gradient.

Only the last stage of a pipeline computes the loss, and a layer of another stage cannot add to it. So it records its
auxiliary losses, and whoever runs the model :func:`collects <collecting>` them: a pipeline on every stage, or a plain
training step in one process. The meaning is the same in both: an auxiliary loss of microbatch k adds to that
microbatch's mean loss, and counts are summed over the microbatches and the replicas of an update.

Nothing is recorded outside of a collection. Activation checkpointing (``torch.utils.checkpoint``) therefore records
once: its forward is collected, and the recomputation in the backward is not. It needs ``use_reentrant=False``, since
the reentrant kind runs its forward without gradients, where nothing is recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn


class StatisticsLayer(nn.Module):
    """A layer that counts something in every forward, and may change buffers of its own once per update.

    Its forward, or a layer around it, calls :func:`add_statistics`.

    Attributes:
        num_statistics: length of the vector that it counts in.
        versioned_buffers: names of its own buffers that :meth:`update_from_statistics` changes. They belong to a weight
            version as the parameters do: a mini-batch runs on those of the version that it runs on.
        metrics: name -> how :meth:`compute_metrics` of several layers become one number for the logger.
    """

    num_statistics: int
    versioned_buffers: tuple[str, ...] = ()
    metrics: ClassVar[Mapping[str, Literal["mean", "max", "min", "sum"]]] = {}

    def update_from_statistics(self, totals: Tensor) -> None:
        """Change the versioned buffers; called once per update that is applied, without gradients.

        Args:
            totals: (num_statistics,) fp64 on the layer's device, summed over the microbatches and replicas of the
                mini-batch. Reading it would make the host wait for a GPU.
        """

    @classmethod
    def compute_metrics(cls, totals: Tensor) -> dict[str, float]:
        """Numbers for the logger, by the names in ``metrics``.

        Args:
            totals: as above, on the host.
        """
        return {}


@dataclass
class Collected:
    """Auxiliary losses and statistics of the layers in a forward.

    Attributes:
        losses: tensors without dimensions, with their graph, in the order in which they were added.
        statistics: layer -> what it counted, (num_statistics,) fp64.
    """

    losses: list[Tensor] = field(default_factory=list)
    statistics: dict[StatisticsLayer, Tensor] = field(default_factory=dict)

    def total_loss(self) -> Tensor | float:
        """Sum of the losses, to be added to a mean loss; 0.0 if there are none."""
        return sum(self.losses[1:], start=self.losses[0]) if self.losses else 0.0

    def take_statistics(self) -> dict[StatisticsLayer, Tensor]:
        """Hand over the statistics: whoever encloses this collection will not see them."""
        taken, self.statistics = self.statistics, {}
        return taken

    def add(self, layer: StatisticsLayer, counts: Tensor) -> None:
        """Add ``counts`` (num_statistics,) to those of a layer."""
        counts = counts.detach().to(torch.float64)
        before = self.statistics.get(layer)
        self.statistics[layer] = counts if before is None else before + counts


COLLECTED: ContextVar[Collected | None] = ContextVar("collected", default=None)


class collecting:  # noqa: N801 - used as a function is, as torch.no_grad; a generator costs every microbatch more
    """Context in which what layers say is collected: ``with collecting() as said``.

    Losses go to the innermost collection alone: exactly one adds them to a loss. Statistics that it did not take go on
    to the collection around it at the end.
    """

    __slots__ = ("_said", "_token")

    def __enter__(self) -> Collected:
        """Begin a collection."""
        self._said = Collected()
        self._token = COLLECTED.set(self._said)
        return self._said

    def __exit__(self, *_: object) -> None:
        """End it."""
        outer = None if self._token.old_value is Token.MISSING else self._token.old_value
        COLLECTED.reset(self._token)
        if outer is not None:
            for layer, counts in self._said.take_statistics().items():
                outer.add(layer, counts)


def add_auxiliary_loss(loss: Tensor) -> None:
    """Add a layer's own loss to that of the microbatch that runs; without gradients, or a collection, it is left out.

    Args:
        loss: a tensor without dimensions; a mean over the microbatch, as the loss itself.
    """
    collected = COLLECTED.get()
    if collected is None or not (torch.is_grad_enabled() and loss.requires_grad):
        return
    if loss.ndim:
        raise ValueError(f"an auxiliary loss must be a tensor without dimensions, got shape {tuple(loss.shape)}")
    collected.losses.append(loss)


def add_statistics(layer: StatisticsLayer, counts: Tensor) -> None:
    """Add what a layer counted in this forward; without gradients, or a collection, it is left out.

    Args:
        layer: whose counts they are.
        counts: (layer.num_statistics,), on any device.

    Raises:
        ValueError: they have another shape.
    """
    collected = COLLECTED.get()
    if collected is None or not torch.is_grad_enabled():
        return
    if counts.shape != (layer.num_statistics,):
        raise ValueError(
            f"{type(layer).__name__} counts in {layer.num_statistics} numbers (num_statistics), but add_statistics got"
            f" a tensor of shape {tuple(counts.shape)}"
        )
    collected.add(layer, counts)
