"""Description of the whole model; every stage creates it before the cut.

Some layers count statistics (:class:`.StatisticsLayer`), which control messages carry. The description has their
positions there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_asyncpp.auxiliary import Collected, StatisticsLayer
from lightning_asyncpp.core.cut.network import CUT, called_by_steps
from lightning_asyncpp.core.cut.pruned import Pruned
from lightning_asyncpp.core.cut.ties import Tie, find_ties, first_sharing
from lightning_asyncpp.core.cut.units import Unit, has_parameters
from lightning_asyncpp.core.schedule import Schedule
from lightning_asyncpp.core.settings import ResolvedSettings

_REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: sum(values) / len(values),
    "max": max,
    "min": min,
    "sum": sum,
}
T = TypeVar("T")


class CountingLayer(NamedTuple):
    """Description of a layer with statistics, for all stages.

    Attributes:
        name: name of the layer in the model.
        kind: class of the layer; it computes metrics from sums of counts.
        start: position of the layer's counts in the vector of all layers.
        length: number of the layer's counts.
    """

    name: str
    kind: type[StatisticsLayer]
    start: int
    length: int

    def of(self, totals: Tensor) -> Tensor:
        """Return this layer's part of the vector of all layers."""
        return totals[self.start : self.start + self.length]


class StatisticsLayout:
    """Layout of the statistics of all layers of a model; the same on all stages.

    Args:
        units: units (parts between two possible cuts) of the whole model, before it is cut.
    """

    def __init__(self, units: Sequence[Unit] = ()) -> None:
        self.layers: list[CountingLayer] = []
        self.length = 0
        for name, layer in counting_layers(units).items():
            self.layers.append(CountingLayer(name, type(layer), self.length, layer.num_statistics))
            self.length += layer.num_statistics

    def pack(self, counted: Mapping[StatisticsLayer, Tensor], own: Mapping[str, StatisticsLayer]) -> Tensor:
        """Return the vector of all layers, (length,) fp64: counts of this stage's layers, zeros for all other layers.

        Args:
            counted: layer -> its counts (num_statistics,).
            own: name -> layer of this stage.
        """
        device = next((counts.device for counts in counted.values()), "cpu")
        vector = torch.zeros(self.length, dtype=torch.float64, device=device)
        for layer in self.layers:
            if layer.name in own and own[layer.name] in counted:
                layer.of(vector).copy_(counted[own[layer.name]])
        return vector

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """Return the metrics to log, reduced over all layers.

        Args:
            totals: statistics (length,) fp64, summed over microbatches, stages and replicas.
        """
        values: dict[str, list[float]] = {}
        reductions: dict[str, str] = {}
        for layer in self.layers:
            reductions.update(layer.kind.metrics)
            for name, value in layer.kind.compute_metrics(layer.of(totals)).items():
                values.setdefault(name, []).append(value)
        return {name: _REDUCTIONS[reductions[name]](of_layers) for name, of_layers in values.items()}


def update_from_counts(model: nn.Module, counted: Collected) -> dict[str, float]:
    """Sum the statistics of a whole model's layers over all processes, and call ``update_from_statistics``.

    This is for training without a pipeline. With several processes it is a collective call.

    Args:
        model: the whole model.
        counted: statistics of this process since the last update.

    Returns:
        Metrics for the logger.
    """
    units = [Unit(name, child) for name, child in model.named_children()]
    layers, layout = counting_layers(units), StatisticsLayout(units)
    totals = layout.pack(counted.take_statistics(), layers)
    totals = totals.to(next((tensor.device for tensor in model.parameters()), totals.device))
    if dist.is_available() and dist.is_initialized() and layers:
        dist.all_reduce(totals)
    for place in layout.layers:
        with torch.no_grad():
            layers[place.name].update_from_statistics(place.of(totals))
    return layout.metrics(totals.cpu())


def counting_layers(units: Sequence[Unit]) -> dict[str, StatisticsLayer]:
    """Return the layers with statistics: first name in the model -> layer."""
    found: dict[StatisticsLayer, str] = {}
    for unit in units:
        for name, module in unit.module.named_modules():
            if isinstance(module, StatisticsLayer):
                found.setdefault(module, unit.path(name))
    return {name: layer for layer, name in found.items()}


@dataclass(frozen=True)
class WholeModel:
    """Description of a whole model; the same on all stages, except ``pruned``.

    Attributes:
        counts: number of units on each stage.
        has_parameters: for each unit, whether it has parameters.
        num_trained: for each stage, number of elements of trained parameters, including shared parameters.
        num_parameters: for each stage, number of elements of all parameters, including shared parameters.
        names: names of the units, in order.
        ties: parameters that several stages share.
        statistics: layout of the layers' statistics in the control message.
        shared_names: each name of a parameter that has several names in the units -> all of these names.
        same: for each parameter that has several names in checkpoints, all of these names; their values must be equal.
        pruned: tensors of other stages, which this process does not have.
    """

    counts: tuple[int, ...] = ()
    has_parameters: tuple[bool, ...] = ()
    num_trained: tuple[int, ...] = ()
    ties: tuple[Tie, ...] = ()
    statistics: StatisticsLayout = field(default_factory=StatisticsLayout)
    shared_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    same: tuple[tuple[str, ...], ...] = ()
    num_parameters: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    pruned: Pruned = field(default_factory=Pruned)

    @classmethod
    def of(cls, units: Sequence[Unit], counts: Sequence[int], root: nn.Module | None = None) -> WholeModel:
        """Describe a model.

        Args:
            units: units of the whole model.
            counts: number of units on each stage.
            root: module whose names checkpoints have: the model, or the module around it.
        """
        return cls(
            counts=tuple(counts),
            has_parameters=tuple(map(has_parameters, units)),
            num_trained=_sizes(units, counts, trained=True),
            ties=tuple(find_ties(units, counts)),
            statistics=StatisticsLayout(units),
            shared_names=_shared_names(units),
            same=() if root is None else _same(root),
            num_parameters=_sizes(units, counts, trained=False),
            names=tuple(unit.name for unit in units),
        )

    def schedule(self, settings: ResolvedSettings, stage: int) -> Schedule:
        """Return the schedule of a stage of this model."""
        return settings.schedule(stage, first_sharing(stage, self.ties))

    def keep(self, model: nn.Module) -> None:
        """Store this description in a cut model, for :func:`whole_of`."""
        vars(called_by_steps(model))[CUT] = self

    def find(self, values: Mapping[str, T], name: str) -> T | None:
        """Return a parameter's value under any of its names; None if ``values`` has no such name.

        The name that a parameter has in a checkpoint depends on the cut.
        """
        if name in values:
            return values[name]
        return next((values[other] for other in self.shared_names.get(name, ()) if other in values), None)


def whole_of(model: nn.Module | None) -> WholeModel | None:
    """Return the description of a model that was cut; None if the model is whole."""
    return None if model is None else vars(called_by_steps(model)).get(CUT)


def _sizes(units: Sequence[Unit], counts: Sequence[int], trained: bool) -> tuple[int, ...]:
    stages = [units[end - count : end] for end, count in zip(accumulate(counts), counts)]
    distinct = [{parameter for unit in stage for parameter in unit.module.parameters()} for stage in stages]
    return tuple(sum(p.numel() for p in parameters if p.requires_grad or not trained) for parameters in distinct)


def _same(root: nn.Module) -> tuple[tuple[str, ...], ...]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return tuple(tuple(several) for several in names.values() if len(several) > 1)


def _shared_names(units: Sequence[Unit]) -> dict[str, tuple[str, ...]]:
    names: dict[int, list[str]] = {}
    for unit in units:
        for name, parameter in unit.module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(unit.path(name))
    return {name: tuple(several) for several in names.values() if len(several) > 1 for name in several}
