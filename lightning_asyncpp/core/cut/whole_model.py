"""Knowledge of the whole model that every stage has, gathered before the model is cut.

It includes the position of each layer's counts in the control message, and how their sums are logged.
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
            totals: (length,) fp64, summed over microbatches, stages and replicas.
        """
        values: dict[str, list[float]] = {}
        reductions: dict[str, str] = {}
        for layer in self.layers:
            reductions.update(layer.kind.metrics)
            for name, value in layer.kind.compute_metrics(layer.of(totals)).items():
                values.setdefault(name, []).append(value)
        return {name: _REDUCTIONS[reductions[name]](of_layers) for name, of_layers in values.items()}


def update_from_counts(model: nn.Module, counted: Collected) -> dict[str, float]:
    """Let the layers of a whole model change their buffers by what they counted in an update, in all processes.

    For strategies other than this package's; a collective call where there are several processes.

    Args:
        model: the whole model.
        counted: what its layers counted since the last update, in this process.

    Returns:
        Numbers for the logger.
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
    """Name in the model -> layer, of the layers in ``units`` that count; of one that has several names the first."""
    found: dict[StatisticsLayer, str] = {}
    for unit in units:
        for name, module in unit.module.named_modules():
            if isinstance(module, StatisticsLayer):
                found.setdefault(module, unit.path(name))
    return {name: layer for layer, name in found.items()}


@dataclass(frozen=True)
class WholeModel:
    """Facts of a model that all stages agree on.

    Attributes:
        counts: number of units on each stage.
        has_parameters: of every unit, whether it holds some.
        num_trained: numbers in parameters that are trained, of every stage; what several stages share counts on each.
        num_parameters: the same of all parameters.
        names: of the units, in order.
        ties: parameters that several stages share.
        statistics: the layers that count, and where their counts stand in the control message.
        shared_names: name of a parameter that several layers have -> all of them.
        same: for every parameter that has several names in the root, all of them: entries that a checkpoint must have
            equal.
        pruned: what the stage that is left in this process does not hold.
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
        """The facts.

        Args:
            units: of the whole model.
            counts: number of them on each stage.
            root: what checkpoints hold: the model, or the module around it.
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
        """Order and weights of what a stage of this model runs."""
        return settings.schedule(stage, first_sharing(stage, self.ties))

    def keep(self, model: nn.Module) -> None:
        """Let a model that is cut know it: see :func:`whole_of`."""
        vars(called_by_steps(model))[CUT] = self

    def find(self, values: Mapping[str, T], name: str) -> T | None:
        """The value of a parameter, under this name of it or another one that another cut knows it by; or None."""
        if name in values:
            return values[name]
        return next((values[other] for other in self.shared_names.get(name, ()) if other in values), None)


def whole_of(model: nn.Module | None) -> WholeModel | None:
    """Return what is known of a model that was cut; None if it is whole."""
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
