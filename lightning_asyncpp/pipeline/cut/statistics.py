"""Where the counts of each layer stand in the control message, and what the logger makes of their sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_asyncpp.auxiliary import StatisticsLayer
from lightning_asyncpp.pipeline.cut.units import Unit, first_names

_REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: sum(values) / len(values),
    "max": max,
    "min": min,
    "sum": sum,
}


class CountingLayer(NamedTuple):
    """A layer that counts, as stages that do not have it know it.

    Attributes:
        name: in the model.
        kind: its class, which turns sums of counts into metrics.
        start: where its counts begin in the vector of all layers.
        length: how many there are.
    """

    name: str
    kind: type[StatisticsLayer]
    start: int
    length: int

    def of(self, totals: Tensor) -> Tensor:
        """This layer's part of the vector of all layers."""
        return totals[self.start : self.start + self.length]


class StatisticsLayout:
    """The layers of a whole model that count, in order; the same on all stages.

    Args:
        units: of the whole model, before it is cut.
    """

    def __init__(self, units: Sequence[Unit] = ()) -> None:
        self.layers: list[CountingLayer] = []
        self.length = 0
        for name, layer in counting_layers(units).items():
            self.layers.append(CountingLayer(name, type(layer), self.length, layer.num_statistics))
            self.length += layer.num_statistics

    def pack(self, counted: Mapping[StatisticsLayer, Tensor], own: Mapping[str, StatisticsLayer]) -> Tensor:
        """The vector of all layers, (length,) fp64 where the counts are, with this stage's in their places.

        Args:
            counted: layer -> its counts (num_statistics,).
            own: name -> layer, of this stage.
        """
        device = next((counts.device for counts in counted.values()), "cpu")
        vector = torch.zeros(self.length, dtype=torch.float64, device=device)
        for layer in self.layers:
            if layer.name in own and own[layer.name] in counted:
                layer.of(vector).copy_(counted[own[layer.name]])
        return vector

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """Numbers for the logger, over all layers.

        Args:
            totals: (length,) fp64, summed over micro-batches, stages and replicas.
        """
        values: dict[str, list[float]] = {}
        reductions: dict[str, str] = {}
        for layer in self.layers:
            reductions.update(layer.kind.metrics)
            for name, value in layer.kind.compute_metrics(layer.of(totals)).items():
                values.setdefault(name, []).append(value)
        return {name: _REDUCTIONS[reductions[name]](of_layers) for name, of_layers in values.items()}


def counting_layers(units: Sequence[Unit]) -> dict[str, StatisticsLayer]:
    """Name in the model -> layer, of the layers in ``units`` that count; of one that has several names the first."""
    found: dict[StatisticsLayer, str] = {}
    for unit in units:
        for name, module in unit.module.named_modules():
            if isinstance(module, StatisticsLayer):
                found.setdefault(module, f"{unit.name}.{name}" if name else unit.name)
    return {name: layer for layer, name in found.items()}


def counting_problems(units: Sequence[Unit], counts: Sequence[int]) -> list[str]:
    """Layers that count, or keep running statistics, whose buffers would not be one model's, with the mend.

    Args:
        units: of the whole model, before it is cut.
        counts: number of units on each stage.
    """
    names = first_names(units, counts, nn.Module.named_modules)
    problems = [
        f"{next(iter(of_stage.values()))} {_does(layer)}, and layers of the stages {list(of_stage)} share it: each"
        " stage would count for itself, and its buffers would drift apart; use a partition that keeps these layers on"
        " one stage, or give each a layer of its own"
        for layer, of_stage in names.items()
        if len(of_stage) > 1 and _does(layer)
    ]
    for name, layer in counting_layers(units).items():
        kept = layer.state_dict()
        if lost := [key for key in layer.versioned_buffers if key not in kept]:
            problems.append(
                f"{name} changes {', '.join(lost)} once per update (versioned_buffers), which no checkpoint would hold:"
                " register it with register_buffer, without persistent=False"
            )
    return problems


def _does(layer: nn.Module) -> str:
    """In words, if a layer changes buffers by what it sees."""
    if isinstance(layer, StatisticsLayer):
        return "counts"
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    moves = isinstance(layer, norms) and layer.track_running_stats and layer.training
    return "keeps running statistics" if moves else ""
