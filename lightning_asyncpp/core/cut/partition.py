"""Number of units of each stage, computed from the costs of the units alone.

The slowest stage sets the pace of a pipeline, so the best cut is the one whose largest load is smallest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

from lightning_asyncpp.errors import ConfigurationError


class Partition(NamedTuple):
    """A chosen cut, and how it came about.

    Attributes:
        counts: units on each stage, first stage first.
        uniform: what :func:`uniform` would have given.
        source: how it was chosen, in words.
        costs: of every unit, in any unit; empty where they are not known.
        remark: what the user should be warned of; empty if nothing.
    """

    counts: tuple[int, ...]
    uniform: tuple[int, ...]
    source: str
    costs: tuple[float, ...] = ()
    remark: str = ""

    @property
    def imbalance(self) -> float | None:
        """Predicted cost of the busiest stage over the mean of all; None where costs are not known."""
        if not self.costs:
            return None
        loads = loads_of(self.costs, self.counts)
        return float(max(loads) / (sum(loads) / len(loads)))

    def describe(self) -> str:
        """For the log: as the argument that would give the same cut, where it came from, and what it promises."""
        known = "" if self.imbalance is None else f", busiest stage {self.imbalance:.2f} times the mean"
        return f"partition={list(self.counts)} {self.source}{known}"


WHOLE = Partition((1,), (1,), "the whole module")
"""Of a module that is not cut."""


def loads_of(costs: Sequence[float], counts: Sequence[int]) -> list[Fraction]:
    """Exact sum of the costs of each stage's units."""
    ends = list(accumulate(counts))
    return [sum(map(Fraction, costs[end - count : end]), Fraction(0)) for end, count in zip(ends, counts)]


def uniform(has_parameters: Sequence[bool], num_stages: int) -> list[int]:
    """Number of units on each stage, units with parameters spread evenly.

    A unit without parameters (an activation function) stays on the stage of the unit before it; the first stages take
    one unit more where the count does not divide.

    Args:
        has_parameters: of every unit.
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
    """Number of units on each stage of the contiguous cut whose largest load is smallest; exact.

    Of such cuts the one whose second largest load is smallest too, then the third, and so on; of those with the same
    loads the one nearest to :func:`uniform`, then the one whose first stages are shorter.

    Args:
        costs: of every unit, finite, 0 or more.
        has_parameters: of every unit; every stage gets one that has some.
        num_stages: number of stages.

    Raises:
        ConfigurationError: there are fewer units with parameters than stages.
    """
    even = list(accumulate(uniform(has_parameters, num_stages)))
    sums = [0, *accumulate(_whole_numbers(costs))]
    heavy = [0, *accumulate(map(int, has_parameters))]
    limit = max(sums[end] - sums[start] for start, end in zip([0, *even], even))
    # Number of units on the stages so far -> their loads, the largest first, their distance from the uniform cut, their
    # ends: the smallest of these stays the smallest whatever is added to all, so one for each number is enough.
    best: dict[int, tuple[tuple[int, ...], int, tuple[int, ...]]] = {0: ((), 0, ())}
    for place in even:
        extended: dict[int, tuple[tuple[int, ...], int, tuple[int, ...]]] = {}
        for start, (loads, distance, ends) in best.items():
            for end in range(start + 1, len(sums)):
                load = sums[end] - sums[start]
                if load > limit:
                    break  # the uniform cut is better
                if heavy[end] > heavy[start]:
                    sorted_loads = tuple(sorted((*loads, load), reverse=True))
                    candidate = (sorted_loads, distance + abs(end - place), (*ends, end))
                    extended[end] = min(candidate, extended.get(end, candidate))
        best = extended
    ends = best[len(costs)][2]
    return [end - start for start, end in zip([0, *ends], ends)]


def check_given(counts: Sequence[int], has_parameters: Sequence[bool]) -> None:
    """Refuse numbers of units that do not fit a model.

    Args:
        counts: on each stage, each at least 1.
        has_parameters: of every unit.

    Raises:
        ConfigurationError: their sum is not the number of units, or a stage would have nothing to train.
    """
    if sum(counts) != len(has_parameters):
        raise ConfigurationError(
            f"partition={list(counts)} places {sum(counts)} layers, but the model has {len(has_parameters)} (the"
            " modules of its nn.Sequential, or what pipeline_layers() returns): the numbers must add up to that"
        )
    ends = list(accumulate(counts))
    empty = [s for s, (end, count) in enumerate(zip(ends, counts)) if not any(has_parameters[end - count : end])]
    if empty:
        stages = ", ".join(f"stage {s} (layers {ends[s] - counts[s]} to {ends[s] - 1})" for s in empty)
        raise ConfigurationError(
            f"partition={list(counts)} leaves {stages} without parameters: every stage needs a layer that has some; the"
            f" layers that do are {', '.join(str(i) for i, heavy in enumerate(has_parameters) if heavy)}"
        )


def _whole_numbers(costs: Sequence[float]) -> list[int]:
    """The same costs times a common factor, so that sums are exact: rounding would decide between equal cuts."""
    exact = [Fraction(cost) for cost in costs]
    factor = math.lcm(*(cost.denominator for cost in exact))
    return [int(cost * factor) for cost in exact]
