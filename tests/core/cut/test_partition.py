"""The arithmetic of cuts: the best one by brute force is the one that is found."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_asyncpp.core.cut.partition import Partition, balanced, check_given, loads_of, uniform
from lightning_asyncpp.errors import ConfigurationError

ROUND = st.integers(0, 4).map(float)  # many equal sums
ROUGH = st.floats(0, 1e6, allow_nan=False)  # sums that rounding would change
UNITS = st.lists(st.tuples(st.one_of(ROUND, ROUGH), st.booleans()), min_size=1, max_size=9)


def all_cuts(heavy: Sequence[bool], num_stages: int) -> Iterator[list[int]]:
    """Every contiguous cut with a unit that has parameters on every stage."""
    for inner in itertools.combinations(range(1, len(heavy)), num_stages - 1):
        starts, ends = (0, *inner), (*inner, len(heavy))
        if all(any(heavy[start:end]) for start, end in zip(starts, ends)):
            yield [end - start for start, end in zip(starts, ends)]


def exact_loads(costs: Sequence[float], counts: Sequence[int]) -> list[Fraction]:
    left = iter(costs)
    return [sum((Fraction(next(left)) for _ in range(count)), Fraction(0)) for count in counts]


@settings(deadline=None, max_examples=300)
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


@pytest.mark.parametrize(
    ("costs", "num_stages", "counts"),
    [
        ([1.0] * 6, 2, [3, 3]),  # equal costs are spread as ever
        ([1.0] * 7, 3, [3, 2, 2]),
        ([0.1, 1, 1, 1, 1, 2.5], 2, [4, 2]),  # a heavy last layer: fewer stand beside it
        ([0, 1, 1, 1, 1, 0.5], 4, [2, 1, 1, 2]),  # the largest load cannot be helped: the second is
        ([9, 1, 1, 1, 1], 3, [1, 2, 2]),
        ([1, 1, 9, 1, 1], 3, [2, 1, 2]),
        ([0, 0, 0, 0], 2, [2, 2]),  # all cuts alike: the nearest to the uniform one
    ],
)
def test_examples(costs: list[float], num_stages: int, counts: list[int]) -> None:
    assert balanced(costs, [True] * len(costs), num_stages) == counts


def test_sums_are_exact() -> None:
    """Of these floats the last three add up to 3e-17 less than the first two; rounded, both sums are 0.5."""
    costs = [0.4, 0.1, 0.3, 0.1]
    assert sum(costs[1:]) == sum(costs[:2]) == 0.5
    assert balanced(costs, [True] * 4, 2) == [1, 3]


def test_large_models_take_no_time() -> None:
    costs = [0.01, *[1.0 + 0.001 * (i % 7) for i in range(200)], 9.0]
    counts = balanced(costs, [True] * 202, 64)
    assert (len(counts), sum(counts)) == (64, 202)
    assert max(loads_of(costs, counts)) == 9


def test_what_a_partition_says_of_itself() -> None:
    partition = Partition((4, 2), (3, 3), "by pipeline_costs()", (0.0, 1.0, 1.0, 1.0, 1.0, 3.0))
    assert partition.imbalance == pytest.approx(4 / 3.5)
    assert partition.describe() == "partition=[4, 2] by pipeline_costs(), busiest stage 1.14 times the mean"
    assert Partition((4, 2), (3, 3), "as given").describe() == "partition=[4, 2] as given"


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([2, 4], r"partition=\[2, 4\] places 6 layers, but the model has 5 .*: the numbers must add up to that"),
        ([1, 2], r"partition=\[1, 2\] places 3 layers, but the model has 5 "),
        (
            [1, 2, 2],
            r"partition=\[1, 2, 2\] leaves stage 1 \(layers 1 to 2\) without parameters: .* that do are 0, 3, 4$",
        ),
    ],
)
def test_numbers_that_do_not_fit(counts: list[int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_given(counts, [True, False, False, True, True])


def test_numbers_that_fit() -> None:
    check_given([2, 3], [True, False, False, True, True])
    check_given([1, 4], [True, False, False, True, True])
