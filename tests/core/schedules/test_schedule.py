"""Schedules give the expected lists of actions; test_schedule_proof.py proves the rules that all lists keep."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_asyncpp.core.schedule import Schedule, StalenessRule, depth


@pytest.mark.parametrize(
    ("schedule", "actions"),
    [
        (Schedule(0, 2), "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 U0 F6 B5 F7 B6 F8 B7 U1 B8 U2"),
        (Schedule(1, 2), "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 U0 F6 B6 F7 B7 F8 B8 U1 U2"),
        (Schedule(0, 2, 0, StalenessRule(0)), "F0 F1 B0 F2 B1 B2 U0 F3 F4 B3 F5 B4 B5 U1 F6 F7 B6 F8 B7 B8 U2"),
        (Schedule(0, 2, 0, StalenessRule(1, 1)), "F0 F1 B0 F2 B1 B2 U0 F3 F4 B3 F5 B4 F6 B5 F7 B6 F8 B7 U1 B8 U2"),
        (Schedule(0, 2, staleness="least"), "F0 F1 B0 F2 B1 F3 B2 U0 F4 B3 F5 B4 F6 B5 U1 F7 B6 F8 B7 B8 U2"),
        (Schedule(1, 2, staleness="least"), "F0 B0 F1 B1 F2 B2 U0 F3 B3 F4 B4 F5 B5 U1 F6 B6 F7 B7 F8 B8 U2"),
        (
            Schedule(1, 2, staleness="least", slack="exact"),
            "F0 B0 F1 B1 F2 B2 F3 B3 U0 F4 B4 F5 B5 F6 B6 U1 F7 B7 F8 B8 U2",
        ),
    ],
    ids=["first stage", "last stage", "flush", "synchronous start", "least, first", "least, last", "exact, last"],
)
def test_lists_of_two_stages_are_those_of_the_drawings(schedule: Schedule, actions: str) -> None:
    assert " ".join(map(str, schedule.run(3, 3))) == actions


@given(st.integers(1, 40), st.integers(0, 40))
def test_hops_share_the_lookahead_evenly(num_stages: int, lookahead: int) -> None:
    depths = [depth(stage, num_stages, lookahead) for stage in range(num_stages)]
    assert depths[-1] == 0
    assert num_stages == 1 or depths[0] == num_stages - 1 + lookahead
    hops = [before - after for before, after in itertools.pairwise(depths)]
    assert min(hops, default=1) >= 1
    runs = [[sum(hops[i : i + n]) for i in range(len(hops) - n + 1)] for n in range(1, num_stages)]
    assert all(max(sums) - min(sums) <= 1 for sums in runs), "runs of equally many hops"
