"""Auxiliary losses of layers, and statistics by which layers adapt themselves.

Only the last stage of a pipeline computes the loss, so layers of earlier stages cannot add to it. Instead layers record
auxiliary losses, and whoever calls the model :func:`collects <collecting>` them: a pipeline on every stage, or a plain
training step in one process. Both give the same result. An auxiliary loss is added to the mean loss of its microbatch.
Statistics are summed over the microbatches and replicas of an update.

Nothing is recorded outside of a collection. The recomputation of activation checkpointing (``torch.utils.checkpoint``)
runs in the backward, after the collection, so it records nothing a second time. Checkpointing needs
``use_reentrant=False``: the reentrant variant disables gradients in the forward, and then nothing is recorded at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn


class StatisticsLayer(nn.Module):
    """Layer that counts something in every forward, and may change its buffers once per update.

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
        """Change the versioned buffers; called once per applied update, with gradients disabled.

        Args:
            totals: (num_statistics,) fp64 on the layer's device, summed over the microbatches and replicas of the
                mini-batch. Reading totals from a GPU waits for the GPU.
        """

    @classmethod
    def compute_metrics(cls, totals: Tensor) -> dict[str, float]:
        """Return the values to log, by the names in ``metrics``.

        Args:
            totals: as in :meth:`update_from_statistics`, on the host.
        """
        return {}


@dataclass
class Collected:
    """Auxiliary losses and statistics that layers recorded in a forward.

    Attributes:
        losses: tensors without dimensions, with their graphs, in the order of recording.
        statistics: layer -> its counts, (num_statistics,) fp64.
    """

    losses: list[Tensor] = field(default_factory=list)
    statistics: dict[StatisticsLayer, Tensor] = field(default_factory=dict)

    def total_loss(self) -> Tensor | float:
        """Return the sum of the losses, to be added to a mean loss; 0.0 without losses."""
        return sum(self.losses[1:], start=self.losses[0]) if self.losses else 0.0

    def take_statistics(self) -> dict[StatisticsLayer, Tensor]:
        """Remove and return the statistics, so that they do not reach the enclosing collection."""
        taken, self.statistics = self.statistics, {}
        return taken

    def add(self, layer: StatisticsLayer, counts: Tensor) -> None:
        """Add ``counts`` (num_statistics,) to a layer's statistics."""
        counts = counts.detach().to(torch.float64)
        before = self.statistics.get(layer)
        self.statistics[layer] = counts if before is None else before + counts


COLLECTED: ContextVar[Collected | None] = ContextVar("collected", default=None)


class collecting:  # noqa: N801 - used like torch.no_grad; a `@contextmanager` generator would slow every microbatch
    """Collect what layers record: ``with collecting() as collected``.

    A loss goes to the innermost collection only, so it is added once. At the end, statistics that nobody took
    (:meth:`Collected.take_statistics`) go to the enclosing collection.

    Example of a step without a strategy of this package::

        with collecting() as collected:
            loss = cross_entropy(model(tokens), targets)
        (loss + collected.total_loss()).backward()
        optimizer.step()
        for layer, counts in collected.statistics.items():
            layer.update_from_statistics(counts)
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
    """Add a layer's loss to the running microbatch's loss.

    The call is ignored outside of a collection, and while gradients are disabled.

    Args:
        loss: tensor without dimensions; a mean over the microbatch, even with ``loss_reduction="sum"``.
    """
    collected = COLLECTED.get()
    if collected is None or not (torch.is_grad_enabled() and loss.requires_grad):
        return
    if loss.ndim:
        raise ValueError(f"an auxiliary loss has shape {tuple(loss.shape)}; reduce it to a tensor without dimensions")
    collected.losses.append(loss)


def add_statistics(layer: StatisticsLayer, counts: Tensor) -> None:
    """Add a layer's counts of this forward.

    The call is ignored outside of a collection, and while gradients are disabled.

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
            f"{type(layer).__name__} has num_statistics={layer.num_statistics}, but add_statistics got a tensor of"
            f" shape {tuple(counts.shape)}; pass a tensor of shape ({layer.num_statistics},)"
        )
    collected.add(layer, counts)
