"""Auxiliary losses of layers, and statistics by which layers adapt without a gradient.

Only the last stage of a pipeline computes the loss, so layers of other stages cannot add to it. They record auxiliary
losses instead, which the caller of the model :func:`collects <collecting>`: a pipeline on every stage, or a plain
training step in one process. Both give the same result: an auxiliary loss of a microbatch adds to that microbatch's
mean loss, and statistics are summed over the microbatches and replicas of an update.

Nothing is recorded outside of a collection. Activation checkpointing (``torch.utils.checkpoint``) therefore records
once, in the forward and not again in the recomputation. It needs ``use_reentrant=False``: the reentrant variant runs
its forward without gradients, where nothing is recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn


class StatisticsLayer(nn.Module):
    """Layer that counts something in every forward, and may change its own buffers once per update.

    Its forward, or a layer around it, calls :func:`add_statistics`.

    Attributes:
        num_statistics: length of the vector of counts.
        versioned_buffers: names of the layer's buffers that :meth:`update_from_statistics` changes. Like parameters,
            they are part of each weight version.
        metrics: name of a metric -> reduction of its values over several layers.
    """

    num_statistics: int
    versioned_buffers: tuple[str, ...] = ()
    metrics: ClassVar[Mapping[str, Literal["mean", "max", "min", "sum"]]] = {}

    def update_from_statistics(self, totals: Tensor) -> None:
        """Change the versioned buffers; called once per update that is applied, without gradients.

        Args:
            totals: (num_statistics,) fp64 on the layer's device, summed over the microbatches and replicas of the
                mini-batch. Reading the values on the host waits for a GPU.
        """

    @classmethod
    def compute_metrics(cls, totals: Tensor) -> dict[str, float]:
        """Return values for the logger, by the names in ``metrics``.

        Args:
            totals: as in :meth:`update_from_statistics`, on the host.
        """
        return {}


@dataclass
class Collected:
    """Auxiliary losses and statistics that layers recorded in a forward.

    Attributes:
        losses: tensors without dimensions, with their graphs, in the order in which they were added.
        statistics: layer -> its counts, (num_statistics,) fp64.
    """

    losses: list[Tensor] = field(default_factory=list)
    statistics: dict[StatisticsLayer, Tensor] = field(default_factory=dict)

    def total_loss(self) -> Tensor | float:
        """Return the sum of the losses, to be added to a mean loss; 0.0 without losses."""
        return sum(self.losses[1:], start=self.losses[0]) if self.losses else 0.0

    def take_statistics(self) -> dict[StatisticsLayer, Tensor]:
        """Return the statistics, hiding them from the enclosing collection."""
        taken, self.statistics = self.statistics, {}
        return taken

    def add(self, layer: StatisticsLayer, counts: Tensor) -> None:
        """Add ``counts`` (num_statistics,) to a layer's statistics."""
        counts = counts.detach().to(torch.float64)
        before = self.statistics.get(layer)
        self.statistics[layer] = counts if before is None else before + counts


COLLECTED: ContextVar[Collected | None] = ContextVar("collected", default=None)


class collecting:  # noqa: N801 - used like torch.no_grad; a generator would slow every microbatch
    """Collect what layers record: ``with collecting() as collected``.

    Losses go to the innermost collection only, so that they are added to a loss once. Statistics that were not taken
    pass to the enclosing collection at the end.
    """

    __slots__ = ("_collected", "_token")

    def __enter__(self) -> Collected:
        """Begin to collect."""
        self._collected = Collected()
        self._token = COLLECTED.set(self._collected)
        return self._collected

    def __exit__(self, *_: object) -> None:
        """Pass the remaining statistics to the enclosing collection."""
        outer = None if self._token.old_value is Token.MISSING else self._token.old_value
        COLLECTED.reset(self._token)
        if outer is not None:
            for layer, counts in self._collected.take_statistics().items():
                outer.add(layer, counts)


def add_auxiliary_loss(loss: Tensor) -> None:
    """Add a layer's loss to the loss of the running microbatch; ignored without gradients or outside of a collection.

    Args:
        loss: tensor without dimensions; a mean over the microbatch, like the loss itself.
    """
    collected = COLLECTED.get()
    if collected is None or not (torch.is_grad_enabled() and loss.requires_grad):
        return
    if loss.ndim:
        raise ValueError(f"an auxiliary loss has shape {tuple(loss.shape)}; reduce it to a tensor without dimensions")
    collected.losses.append(loss)


def add_statistics(layer: StatisticsLayer, counts: Tensor) -> None:
    """Add a layer's counts in this forward; ignored without gradients or outside of a collection.

    Args:
        layer: layer that counted.
        counts: (layer.num_statistics,), on any device.

    Raises:
        ValueError: ``counts`` has another shape.
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
