"""Draining at any moment changes the clock, never the trajectory."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lightning_asyncpp.core.schedule import Slack, Staleness
from tests.helpers.cases import Case
from tests.helpers.compare import assert_same_losses, assert_same_norms, assert_same_weights
from tests.helpers.engine import run_oracle
from tests.helpers.engine_pool import EnginePools

# No shrinking and no database: an example takes a second, and every run of the suite draws the same ones.
quick = settings(
    max_examples=7, derandomize=True, database=None, deadline=None, phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
drains = st.sets(st.integers(0, 5), min_size=1).map(lambda steps: tuple(sorted(steps)))


@pytest.mark.parametrize("num_stages", [pytest.param(2, marks=pytest.mark.slow), 3])
@quick
@given(
    drains=drains, extra=st.integers(0, 2), accumulate=st.sampled_from([1, 2]), feedback=st.booleans(),
    rule=st.sampled_from([("uniform", 0), ("least", 0), ("least", 1), ("least", "exact")]),
)  # fmt: skip
def test_drains_do_not_change_the_result(
    engine_pools: EnginePools, num_stages: int, drains: tuple[int, ...], extra: int, accumulate: int, feedback: bool,
    rule: tuple[Staleness, Slack],
) -> None:  # fmt: skip
    case = Case(
        num_stages + extra, drains=drains, accumulate=accumulate, error_feedback=1.0 if feedback else None,
        max_norm=0.5, scheduler=True, dropout=0.1, batch_sizes=(7, 7, 7, 7, 7, 3), staleness=rule[0], slack=rule[1],
    )  # fmt: skip
    results = engine_pools.run(case, num_stages)
    weights, losses = run_oracle(dataclasses.replace(case, drains=()), num_stages)
    assert_same_weights(results, weights)
    assert_same_losses(results, losses)
    assert_same_norms(results)
