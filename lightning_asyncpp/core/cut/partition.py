"""Partition: number of units of each stage, computed from the units' costs.

A unit is a part of the model between two possible cuts. The slowest stage limits a pipeline, so the best partition
minimises the largest load, the sum of the costs of a stage's units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

from lightning_asyncpp.errors import ConfigurationError


class Partition(NamedTuple):
    """Chosen partition, and the basis of the choice.

    Attributes:
        counts: number of units on each stage, in order.
        source: basis of the choice, for messages.
        costs: cost of every unit, on any scale; empty if not known.
        remark: warning for the user; empty if there is none.
    """

    counts: tuple[int, ...]
    source: str
    costs: tuple[float, ...] = ()
    remark: str = ""

    @property
    def imbalance(self) -> float | None:
        """Predicted cost of the busiest stage, divided by the stages' mean cost; None if costs are not known."""
        if not self.costs:
            return None
        loads = loads_of(self.costs, self.counts)
        return float(max(loads) / (sum(loads) / len(loads)))

    def describe(self) -> str:
        """Return a line for the log: the partition as an argument, its basis, and its imbalance."""
        known = "" if self.imbalance is None else f", busiest stage {self.imbalance:.2f} times the mean"
        return f"partition={list(self.counts)} {self.source}{known}"


WHOLE = Partition((1,), "the whole module")
"""Partition of a module that is not cut."""


def loads_of(costs: Sequence[float], counts: Sequence[int]) -> list[Fraction]:
    """Return the exact sum of the costs of each stage's units."""
    ends = list(accumulate(counts))
    return [sum(map(Fraction, costs[end - count : end]), Fraction(0)) for end, count in zip(ends, counts)]


def uniform(has_parameters: Sequence[bool], num_stages: int) -> list[int]:
    """Return each stage's number of units, spreading units with parameters evenly.

    A unit without parameters, such as an activation function, is on the stage of the unit before it. If units with
    parameters cannot be spread evenly, each of the first stages has one more of them.

    Args:
        has_parameters: for each unit, whether it has parameters.
        num_stages: number of stages.

    Raises:
        ConfigurationError: there are fewer units with parameters than stages.
    """
    heavy = [index for index, trained in enumerate(has_parameters) if trained]
    if len(heavy) < num_stages:
        raise ConfigurationError(
            f"the model has {len(heavy)} layers with parameters, fewer than the {num_stages} stages: use at most"
            f" {len(heavy)} devices per replica, or return finer layers from pipeline_layers()"
        )
    size, longer = divmod(len(heavy), num_stages)
    firsts = [stage * size + min(stage, longer) for stage in range(num_stages)]
    starts = [0] + [heavy[first] for first in firsts[1:]]
    return [end - start for start, end in zip(starts, [*starts[1:], len(has_parameters)])]


def balanced(costs: Sequence[float], has_parameters: Sequence[bool], num_stages: int) -> list[int]:
    """Return each stage's number of units, minimising the largest load.

    The result is an exact optimum, not a heuristic. Between partitions with the same largest load, the second largest
    load decides, then the third, and so on, then the distance from :func:`uniform`; finally, shorter first stages win.

    Args:
        costs: cost of each unit, finite and at least 0.
        has_parameters: for each unit, whether it has parameters; every stage gets at least one unit with parameters.
        num_stages: number of stages.

    Raises:
        ConfigurationError: there are fewer units with parameters than stages.
    """
    even = list(accumulate(uniform(has_parameters, num_stages)))
    sums = [0, *accumulate(_whole_numbers(costs))]
    heavy = [0, *accumulate(map(int, has_parameters))]
    limit = max(sums[end] - sums[start] for start, end in zip([0, *even], even))
    # Number of units on the stages so far -> (loads in decreasing order, distance from the uniform partition, ends).
    # The smallest tuple stays the smallest whatever stages follow, so one tuple per number of units is enough.
    best: dict[int, tuple[tuple[int, ...], int, tuple[int, ...]]] = {0: ((), 0, ())}
    for place in even:
        extended: dict[int, tuple[tuple[int, ...], int, tuple[int, ...]]] = {}
        for start, (loads, distance, ends) in best.items():
            for end in range(start + 1, len(sums)):
                load = sums[end] - sums[start]
                if load > limit:
                    break  # the uniform partition is better
                if heavy[end] > heavy[start]:
                    sorted_loads = tuple(sorted((*loads, load), reverse=True))
                    candidate = (sorted_loads, distance + abs(end - place), (*ends, end))
                    extended[end] = min(candidate, extended.get(end, candidate))
        best = extended
    ends = best[len(costs)][2]
    return [end - start for start, end in zip([0, *ends], ends)]


def check_given(counts: Sequence[int], has_parameters: Sequence[bool]) -> None:
    """Check that the user's numbers of units fit a model.

    Args:
        counts: number of units on each stage, each at least 1.
        has_parameters: for each unit, whether it has parameters.

    Raises:
        ConfigurationError: the sum is not the number of units, or a stage would have no parameters.
    """
    if sum(counts) != len(has_parameters):
        raise ConfigurationError(
            f"partition={list(counts)} places {sum(counts)} layers, but the model has {len(has_parameters)} (the"
            f" modules of its nn.Sequential, or what pipeline_layers() returns): give numbers with the sum"
            f" {len(has_parameters)}"
        )
    ends = list(accumulate(counts))
    empty = [s for s, (end, count) in enumerate(zip(ends, counts)) if not any(has_parameters[end - count : end])]
    if empty:
        stages = ", ".join(f"stage {s} (layers {ends[s] - counts[s]} to {ends[s] - 1})" for s in empty)
        raise ConfigurationError(
            f"partition={list(counts)} leaves {stages} without parameters: give every stage a layer with parameters;"
            f" these are layers {', '.join(str(i) for i, heavy in enumerate(has_parameters) if heavy)}"
        )


def _whole_numbers(costs: Sequence[float]) -> list[int]:
    """Return costs scaled to integers, so that rounding of sums cannot decide between partitions of equal loads."""
    exact = [Fraction(cost) for cost in costs]
    factor = math.lcm(*(cost.denominator for cost in exact))
    return [int(cost * factor) for cost in exact]
