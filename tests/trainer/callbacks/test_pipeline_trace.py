"""The files of PipelineTrace show what happened in a training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_asyncpp import PipelineMonitor, PipelineTrace
from lightning_asyncpp.core.schedule import Kind
from lightning_asyncpp.core.trace import Activity, Wait
from lightning_asyncpp.tools.recorded_run import RecordedRun, read_run
from lightning_asyncpp.tools.trace_summary import summarise
from tests.helpers.pool import Pools
from tests.helpers.recorded import EndsSuddenly, Lags, fit_asleep, fit_twice, off_schedule
from tests.helpers.trainer import Net, Run, fit
from tests.trainer.idioms.optimization import EverySecondBatch

SMALL = Run(Net, options={"microbatches": 2}, samples=48, batch_size=8)
LEAST = {"microbatches": 4, "staleness": "least"}
SAME = (*Kind, Wait.ACTIVATION, Wait.GRADIENT, Wait.AGREEMENT, Activity.SEND, Activity.DRAIN, Activity.EVALUATE)
MONITOR = (PipelineMonitor, {"window": 50, "every_n_batches": 1})


def recorded(run: Run, folder: Path) -> Run:
    trace = (PipelineTrace, {"dirpath": str(folder / "trace")})
    return replace(run, callbacks=(trace, *run.callbacks))


def indices(run: RecordedRun, kind: Kind | Wait | Activity, stage: int = 0) -> list[int]:
    return sorted(span.index for span in run.ranks[stage].spans if span.kind is kind)


def test_utilisation_is_that_of_the_wall_clock(pools: Pools, tmp_path: Path) -> None:
    """Recorded times equal the sleep that layers measure, and the training time that an independent clock measures."""
    for times in (1, 3, 9):  # a busy machine may delay a process between the two clocks: longer sleeps hide it
        run = recorded(Run(Net, options={"microbatches": 4}, samples=32), tmp_path / str(times))
        slept = pools.run(2, fit_asleep, run, times)[::-1]  # rank 0 is the last stage
        summary = summarise(read_run(tmp_path / str(times) / "trace"))
        found = [part for row in summary.rows for part in (summary.seconds, row.utilisation * summary.seconds)]
        expected = pytest.approx([part for stage in slept for part in (stage.elapsed, stage.asleep)], rel=0.03)
        if found == expected:
            break
    assert found == expected
    assert [sum(row.shares.values()) for row in summary.rows] == pytest.approx([1, 1])


def test_every_action_is_recorded_with_its_weights(pools: Pools, tmp_path: Path) -> None:
    """Actions are recorded with weight versions, also on stages that step ahead; every fit has its own folder."""
    pools.run(2, fit_twice, recorded(replace(SMALL, options=LEAST), tmp_path))
    read, again = read_run(tmp_path / "trace"), read_run(tmp_path / "trace-2")
    assert read.mini_batches == again.mini_batches == range(6)
    for stage in (0, 1):
        assert indices(read, Kind.FORWARD, stage) == indices(read, Kind.BACKWARD, stage) == list(range(24))
        assert indices(read, Kind.UPDATE, stage) == list(range(6))
        assert indices(read, Wait.DATA, stage) == [1, 2, 3, 4, 5, 6]
    versions = {s.index: s.version for s in read.ranks[0].spans if s.kind is Kind.FORWARD}
    assert [versions[k] for k in range(24)] == [*[0] * 4, *[1] * 4, 1, *[2] * 4, *[3] * 4, *[4] * 4, *[5] * 3]
    assert (off_schedule(read), [row.staleness for row in summarise(read).rows]) == ([], [0.25, 0])
    for rank in read.ranks:  # a stage that steps ahead waits for what its update needs, and later for the others' part
        updates = {s.index: s.start for s in rank.spans if s.kind is Kind.UPDATE}
        waits = [(s.index, s.end <= updates[s.index]) for s in rank.spans if s.kind is Wait.AGREEMENT]
        assert waits == [(0, True), *((t, ahead) for t in range(1, 6) for ahead in (True, False))]


@pytest.mark.parametrize(
    ("module", "accumulate", "slack", "staleness"),
    [(Net, 2, 4, [5 / 8, 4 / 8]), (EverySecondBatch, 1, 1, [2 / 4, 1 / 4])],
    ids=["accumulated batches are one mini-batch", "a dropped gradient begins it anew"],
)
def test_microbatches_count_from_their_mini_batch(
    pools: Pools, tmp_path: Path, module: type[Net], accumulate: int, slack: int, staleness: list[float]
) -> None:
    run = replace(SMALL, module=module, options={**LEAST, "slack": slack}, callbacks=(MONITOR,))
    run = replace(run, trainer={"logger": "list", "accumulate_grad_batches": accumulate})
    results = pools.run(2, fit, recorded(run, tmp_path))
    read = read_run(tmp_path / "trace")
    assert (off_schedule(read), [row.staleness for row in summarise(read).rows]) == ([], staleness)
    logged = [metrics["gradient_staleness"] for _, metrics in results[0]["records"] if "bubble" in metrics]
    assert logged == sorted(logged)  # 0 in the first mini-batches, then constant
    assert (logged[0], len(set(logged))) == (0, 2)


def test_a_failed_run_leaves_its_trace(pools: Pools, tmp_path: Path) -> None:
    outcomes = pools.outcomes(2, fit, recorded(replace(SMALL, callbacks=((EndsSuddenly, {}),)), tmp_path))
    assert all(outcome.error for outcome in outcomes)
    assert max(indices(read_run(tmp_path / "trace"), Kind.FORWARD)) >= 7


def test_drains_are_kept_apart_also_where_a_device_is_later_than_its_host(pools: Pools, tmp_path: Path) -> None:
    """Spans that a device has not finished when a batch ends are read after a later batch, or at the training's end."""
    saves = (ModelCheckpoint, {"dirpath": str(tmp_path / "saved"), "every_n_train_steps": 3, "save_top_k": -1})
    trainer = {"logger": "list", "val_check_interval": 4, "enable_checkpointing": True}
    plain = replace(SMALL, val_samples=(8,), trainer=trainer, callbacks=(MONITOR, saves))
    lagging = recorded(plain, tmp_path)
    results = pools.run(2, fit, replace(lagging, callbacks=((Lags, {}), *lagging.callbacks)))
    pools.run(2, fit, recorded(plain, tmp_path / "host"))
    read, host = read_run(tmp_path / "trace"), read_run(tmp_path / "host" / "trace")
    assert (read.notes, off_schedule(read), off_schedule(host)) == ([], [], [])
    assert [indices(host, kind) for kind in (Activity.EVALUATE, Activity.CHECKPOINT)] == [[4], [3, 6]]
    assert summarise(host).rows[0].shares["evaluate"] > 0
    for stage in range(2):
        for kind in SAME:
            assert indices(read, kind, stage) == indices(host, kind, stage), kind
        assert read.ranks[stage].places == host.ranks[stage].places
    bubbles = [metrics["bubble"] for _, metrics in results[0]["records"] if "bubble" in metrics]
    assert bubbles
    assert all(0 <= bubble < 1 for bubble in bubbles)
