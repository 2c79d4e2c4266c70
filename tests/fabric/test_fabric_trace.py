"""Recording a Fabric loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lightning_asyncpp.core.schedule import Kind
from lightning_asyncpp.core.trace import Activity, Wait
from lightning_asyncpp.fabric import AsyncPipelineStrategy
from lightning_asyncpp.tools.recorded_run import read_run
from lightning_asyncpp.tools.trace_summary import summarise
from tests.helpers.cases import Case
from tests.helpers.fabric import Run, make_fabric, train
from tests.helpers.pool import Pools
from tests.helpers.recorded import off_schedule

CASE = Case(microbatches=4, batch_sizes=(8,) * 6)


def recorded(case: Case, folder: str, window: dict[str, Any], evaluate_after: tuple[int, ...] = ()) -> dict[str, Any]:
    """Train a case while it is recorded."""
    run = Run(case)
    with run.strategy.record_trace(folder, **window) as recording:
        run.train(evaluate_after=evaluate_after)
        result = run.result()
    assert str(recording.folder) == folder
    assert run.strategy.session.engine is not None
    assert run.strategy.session.engine.runner.trace is None  # nobody pays for it any more
    return result


def record_too_early(folder: str) -> None:
    """Ask for a recording before there is anything to record."""
    strategy = AsyncPipelineStrategy(microbatches=2)
    make_fabric(strategy)
    strategy.record_trace(folder)


def test_a_loop_is_recorded(pools: Pools, tmp_path: Path) -> None:
    pools.run(2, recorded, CASE, str(tmp_path / "trace"), {}, (2,))
    run = read_run(tmp_path / "trace")
    summary = summarise(run)
    assert not off_schedule(run)
    assert summary.total.staleness == 1
    for rank in run.ranks:
        kinds = {kind: [s.index for s in rank.spans if s.kind is kind] for kind in (*Kind, *Wait, *Activity)}
        assert kinds[Kind.UPDATE] == list(range(6))
        assert sorted(kinds[Kind.FORWARD]) == sorted(kinds[Kind.BACKWARD])
        assert kinds[Wait.DATA] == [1, 2, 3, 3, 4, 5]
        assert kinds[Activity.EVALUATE] == [3]


def test_recording_changes_nothing(pools: Pools, tmp_path: Path) -> None:
    plain = pools.run(2, train, CASE)
    seen = pools.run(2, recorded, CASE, str(tmp_path / "trace"), {"first_mini_batch": 1, "mini_batches": 2})
    for before, after in zip(plain, seen):
        for name, weights in before["weights"].items():
            np.testing.assert_array_equal(weights, after["weights"][name])
    assert read_run(tmp_path / "trace").mini_batches == range(1, 3)


def test_a_recording_too_early_is_refused(pools: Pools, tmp_path: Path) -> None:
    for outcome in pools.outcomes(2, record_too_early, str(tmp_path)):
        assert outcome.error == "ConfigurationError", outcome.trace
        assert "strategy.record_trace() needs a model and an optimizer" in outcome.message
