"""What research/notes/performance.md says about the slack of schedules."""

from __future__ import annotations

import itertools

import pytest

from research.theory.slack import (
    TRAVELLING,
    WORK,
    actions_of,
    at_the_end,
    in_flight,
    period,
    spread,
    utilisation,
)
from tests.core.schedules.schedule_proof import StageList, check_lists


@pytest.mark.parametrize(("extra", "microbatches"), [(0, 8), (1, 8), (3, 12), (7, 16)])
def test_the_formula_of_the_period_is_that_of_a_simulation(extra: int, microbatches: int) -> None:
    for place, hop in itertools.product((at_the_end, spread), (0.15, 0.3)):
        depths = place(8, extra)
        simulated = utilisation([[d] * microbatches for d in depths], hop)
        assert simulated == pytest.approx(WORK / period(depths, hop), abs=1e-3)


@pytest.mark.parametrize(
    ("hop", "times"),
    [  # hops in forwards and backwards; lookahead -> time over the ideal, as research/notes/lookahead.md has it
        (1.0, {0: 2.5, 3: 1.43, 6: 1.0}),
        (2.0, {0: 4.0, 3: 2.28, 12: 1.0}),
    ],
)
def test_lookahead_hides_hops(hop: float, times: dict[int, float]) -> None:
    for lookahead, expected in times.items():
        used = utilisation([[d] * 16 for d in spread(4, lookahead)], hop * WORK)
        assert 1 / used == pytest.approx(expected, abs=0.01)


def test_spreading_the_extra_microbatches_hides_more_with_fewer_in_flight() -> None:
    """The longest run of hops without slack decides: a cycle over L of them gains 2 L hops in L + 1 microbatches."""
    for num_stages in range(2, 17):
        for extra in range(num_stages):
            even, end = spread(num_stages, extra), at_the_end(num_stages, extra)
            assert even[0] == end[0]
            assert sum(even) <= sum(end)
            run = -(-(num_stages - 1 - extra) // (extra + 1))
            hop = WORK * 0.001
            assert period(even, hop) == pytest.approx(WORK + 2 * run * hop / (run + 1))
            assert period(even, hop) <= period(end, hop) + 1e-12


def test_spreading_is_the_best_that_constant_depths_can_do() -> None:
    for num_stages in range(2, 8):
        for extra in range(num_stages):
            best = min(
                period([sum(1 + gain for gain in gains[stage:]) for stage in range(num_stages)], 0.03)
                for gains in itertools.product(range(3), repeat=num_stages - 1)
                if sum(gains) == extra
            )
            assert period(spread(num_stages, extra), 0.03) == pytest.approx(best)


def test_the_travelling_order_keeps_the_rules_and_costs_eight_hops_per_mini_batch() -> None:
    lists = [StageList(actions_of(leads, 5), in_flight(leads) - 1, 1) for leads in TRAVELLING]
    assert check_lists(lists, 8) == []
    for hop in (0.06, 0.3):
        assert 8 * WORK / utilisation(TRAVELLING, hop) - 8 * WORK == pytest.approx(8 * hop)
