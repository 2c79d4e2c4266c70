"""Recording a Fabric loop."""

from __future__ import annotations

from pathlib import Path

from lightning_asyncpp.core.schedule import Kind
from lightning_asyncpp.core.trace import Beside, Wait
from lightning_asyncpp.tools.recorded_run import read_run
from lightning_asyncpp.tools.trace_summary import summarise
from tests.helpers.cases import Case
from tests.helpers.fabric import Run
from tests.helpers.pool import Pools
from tests.helpers.recorded import off_schedule


def recorded(folder: str) -> None:
    """Train while it is recorded; afterwards nobody pays for it any more."""
    run = Run(Case(microbatches=4, batch_sizes=(8,) * 6))
    with run.strategy.record_trace(folder):
        run.train(evaluate_after=(2,))
        run.strategy.flush()
    assert run.strategy.session.running().runner.trace is None


def test_a_loop_is_recorded(pools: Pools, tmp_path: Path) -> None:
    pools.run(2, recorded, str(tmp_path / "trace"))
    run = read_run(tmp_path / "trace")
    assert not off_schedule(run)
    assert summarise(run).total.staleness == 1
    for rank in run.ranks:
        kinds = {kind: [s.index for s in rank.spans if s.kind is kind] for kind in (*Kind, *Wait, *Beside)}
        assert kinds[Kind.UPDATE] == list(range(6))
        assert sorted(kinds[Kind.FORWARD]) == sorted(kinds[Kind.BACKWARD])
        assert kinds[Wait.DATA] == [1, 2, 3, 3, 4, 5]
        assert kinds[Beside.EVALUATE] == [3]
