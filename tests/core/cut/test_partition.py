"""Cuts follow the user, the model's costs, measured times or sizes; a search by brute force finds no better cut."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_asyncpp.core.cut.cutting import cut
from lightning_asyncpp.core.cut.partition import balanced, uniform
from lightning_asyncpp.core.cut.partition_choice import Example, choose_partition, unit_times
from lightning_asyncpp.core.cut.units import pipeline_units
from lightning_asyncpp.errors import ConfigurationError
from tests.helpers.cases import Layer, Sleeping

ROUND = st.integers(0, 4).map(float)  # many sums are equal
ROUGH = st.floats(0, 1e6, allow_nan=False)  # rounding would change sums
UNITS = st.lists(st.tuples(st.one_of(ROUND, ROUGH), st.booleans()), min_size=1, max_size=9)


def all_cuts(heavy: Sequence[bool], num_stages: int) -> Iterator[list[int]]:
    """Yield every contiguous cut that gives every stage a unit with parameters."""
    for inner in itertools.combinations(range(1, len(heavy)), num_stages - 1):
        starts, ends = (0, *inner), (*inner, len(heavy))
        if all(any(heavy[start:end]) for start, end in zip(starts, ends)):
            yield [end - start for start, end in zip(starts, ends)]


def exact_loads(costs: Sequence[float], counts: Sequence[int]) -> list[Fraction]:
    left = iter(costs)
    return [sum((Fraction(next(left)) for _ in range(count)), Fraction(0)) for count in counts]


@settings(deadline=None, max_examples=150)
@given(UNITS, st.integers(1, 4))
def test_no_cut_is_better(units: list[tuple[float, bool]], num_stages: int) -> None:
    costs, heavy = [cost for cost, _ in units], [trained for _, trained in units]
    if sum(heavy) < num_stages:
        with pytest.raises(ConfigurationError, match=f"has {sum(heavy)} layers with parameters, fewer than the"):
            balanced(costs, heavy, num_stages)
        return
    ends = list(itertools.accumulate(uniform(heavy, num_stages)))

    def badness(counts: Sequence[int]) -> tuple:
        own = list(itertools.accumulate(counts))
        return sorted(exact_loads(costs, counts), reverse=True), sum(abs(a - b) for a, b in zip(own, ends)), own

    counts = balanced(costs, heavy, num_stages)
    assert badness(counts) == min(badness(other) for other in all_cuts(heavy, num_stages))
    assert counts in list(all_cuts(heavy, num_stages))


CPU = torch.device("cpu")


def four_lines(*costs: float) -> nn.Sequential:
    """Return a model of four layers, with ``pipeline_costs()`` if costs are given."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    if costs:
        model.pipeline_costs = lambda: costs
    return model


def example(*args: Any, **kwargs: Any) -> Example:
    return Example(lambda: (args, kwargs), CPU)


def test_the_model_knows_best() -> None:
    model = four_lines(3, 1, 1, 1.0)
    partition = choose_partition(model, 0, 2, "auto", example(torch.ones(2, 4)))
    assert partition.counts == (1, 3)
    assert partition.describe() == "partition=[1, 3] by pipeline_costs(), busiest stage 1.00 times the mean"


def test_measured_times_come_before_sizes() -> None:
    model = nn.Sequential(Sleeping(4, 10), *[Sleeping(4, 1) for _ in range(4)])
    measured = choose_partition(model, 0, 2, "auto", example(torch.ones(2, 4)))
    assert measured.counts == (1, 4)
    assert measured.describe().startswith("partition=[1, 4] by measured times, busiest stage 1.")
    by_size = choose_partition(model, 0, 2, "auto")
    assert by_size.counts == (3, 2)
    assert by_size.describe() == "partition=[3, 2] by numbers of parameters, busiest stage 1.20 times the mean"
    assert not measured.remark
    assert not by_size.remark


def test_what_the_user_says_counts() -> None:
    model = four_lines(3, 1, 1, 1)
    given = choose_partition(model, 0, 2, [3, 1])
    assert given.describe() == "partition=[3, 1] as given, busiest stage 1.67 times the mean"
    even = choose_partition(model, 0, 2, "uniform")
    assert even.describe() == "partition=[2, 2] by numbers of layers, busiest stage 1.33 times the mean"
    unknown = choose_partition(four_lines(), 0, 2, (3, 1), example("no tensor"))
    assert unknown.describe() == "partition=[3, 1] as given"


@pytest.mark.parametrize("costs", [[1, 2, 3], [1, 2, 3, float("inf")], [0, 0, 0, 0]])
def test_costs_that_make_no_sense(costs: list[Any]) -> None:
    with pytest.raises(ConfigurationError, match="one cost for each of the 4 layers, finite numbers, 0 or more"):
        choose_partition(four_lines(*costs), 0, 2, "auto")


def test_a_model_that_was_cut_before() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.Linear(4, 4))
    cut(model, 1, 2, 0, CPU, counts=[1, 3])
    again = choose_partition(model, 1, 2, "auto", Example(pytest.fail, CPU))  # type: ignore[arg-type]
    assert again.describe() == "partition=[1, 3] as the model was cut before"
    even = choose_partition(model, 1, 2, "uniform")
    assert even.counts == (3, 1)  # it is known that layer 0 had parameters and layer 1 none
    with pytest.raises(ConfigurationError, match="cannot be cut with partition="):
        cut(model, 1, 2, 0, CPU, counts=[3, 1])
    with pytest.raises(ConfigurationError, match=r"was already cut to stage . of 2 and cannot be cut to stage . of 3"):
        choose_partition(model, 1, 3, "auto")


# -- measuring --------------------------------------------------------------------------------------------------------


class Joining(nn.Linear):
    """Linear layer that takes two tensors and adds one to the other in place."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        x, y = pair
        x += y
        return super().forward(x)


class Counted(nn.Module):
    """Layer that counts how many layers of its class have memory at the same time."""

    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = 0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 8))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        Counted.alive.add(self.weight)
        Counted.most = max(Counted.most, len(Counted.alive))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def test_a_model_on_the_meta_device_is_measured_layer_by_layer() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*[Counted() for _ in range(5)])
    times = unit_times(pipeline_units(model), example(torch.ones(2, 8)), seed=0)
    assert len(times) == 5
    assert min(times) > 0
    assert Counted.most == 1
    assert all(p.is_meta for p in model.parameters())


def test_measuring_leaves_the_model_as_it_was() -> None:
    """This also holds for layers that change their input or their buffers, or draw random numbers."""
    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout(0.5),
        Layer(nn.Linear(4, 4), "twice"), Joining(4, 4),
    )  # fmt: skip
    before, x = copy.deepcopy(model.state_dict()), torch.randn(6, 4)
    inputs, states = x.clone(), torch.get_rng_state()
    with torch.inference_mode():
        times = unit_times(pipeline_units(model.eval()), example(x), seed=0)
    assert len(times) == 6
    assert min(times) > 0
    assert torch.equal(torch.get_rng_state(), states)
    assert torch.equal(x, inputs)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(module.training for module in model.modules())
