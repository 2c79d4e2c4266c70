"""Fabric loops train to the oracle's weights, bitwise in fp32, with all stages in this process and over processes."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.cli import OptimizerCallable
from torch.optim.swa_utils import AveragedModel

from lightning_asyncpp.core.schedule import Kind
from lightning_asyncpp.core.trace import Activity, Wait
from lightning_asyncpp.storage import merged
from lightning_asyncpp.tools.recorded_run import read_run
from lightning_asyncpp.tools.trace_summary import summarise
from tests.helpers.cases import Case, frozen_in_front, make_model
from tests.helpers.engine import assert_ranks_agree, assert_same_weights, run_oracle
from tests.helpers.fabric import Run, go_through, train
from tests.helpers.oracle import assert_equal_weights
from tests.helpers.pool import Pools
from tests.helpers.recorded import off_schedule
from tests.helpers.trainer import arrays

BATCHES = (8, 8, 8, 8, 5)
FEEDBACK: dict[str, Any] = {"optimizer": "muon", "error_feedback": 1.0, "max_norm": 0.3, "batch_sizes": BATCHES}
CASES = {
    "muon-feedback-clip-schedule": Case(3, scheduler=True, cut="back", **FEEDBACK),
    "accumulate-dropout": Case(
        3, accumulate=2, dropout=0.2, random_input=True, max_norm=0.3, batch_sizes=BATCHES, cut="front"
    ),
    "weights-skip": Case(4, unequal_weights=True, nan_at=1, max_norm=0.3, batch_sizes=BATCHES),
    "shared-routed": Case(3, tied=True, routed=True, **FEEDBACK),
    "synchronous": Case(3, delay=0, optimizer="muon", error_feedback=1.0, scheduler=True, batch_sizes=BATCHES),
    "a-stage-trains-nothing": Case(3, model=frozen_in_front, cut=(1, 2, 2)),
    "least-staleness": Case(6, 0, staleness="least", max_norm=0.3, dropout=0.3, scheduler=True),
    "least-staleness-exact": Case(4, 0, staleness="least", slack="exact", error_feedback=1.0),
}
OVER_PROCESSES = ["accumulate-dropout", "shared-routed", "a-stage-trains-nothing"]
RESUMED = Case(
    3, optimizer="muon", error_feedback=1.0, max_norm=0.3, scheduler=True, dropout=0.2, accumulate=2,
    batch_sizes=(8,) * 10, cut="front",
)  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_weights_are_the_oracles(name: str) -> None:
    case = CASES[name]
    result = train(case, (1, 2), stages=3, at_once=case.routed)
    weights, losses = run_oracle(case, 3)
    assert_same_weights([result], weights)
    if case.accumulate == 1:
        assert result["losses"] == pytest.approx(losses, rel=1e-6, nan_ok=True)


@pytest.mark.parametrize("name", OVER_PROCESSES)
def test_processes_come_to_them(pools: Pools, name: str) -> None:
    """An evaluation within a mini-batch drains all stages, including the last one, which has nothing in flight."""
    case = CASES[name]
    results = pools.run(3, partial(train, evaluates_each=case.accumulate > 1, at_once=case.routed), case, (1, 2))
    assert_same_weights(results, run_oracle(case)[0])
    assert_ranks_agree(results)
    assert all(result["metrics"] == results[0]["metrics"] for result in results)
    assert name != "shared-routed" or results[0]["metrics"]["samples"] == 2 * 5.0


def test_replicas_come_to_them_to_rounding(pools: Pools) -> None:
    case = Case(4, data_parallel_size=2, max_norm=0.3, scheduler=True)
    assert_same_weights(pools.run(4, train, case, (1,)), run_oracle(case)[0], 2e-6)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_lower_precision_does_not_depend_on_the_number_of_stages(pools: Pools, precision: str) -> None:
    case = Case(3, max_norm=0.3, dropout=0.2)
    one = train(case, (1,), precision, stages=1)["weights"]
    three = merged([result["weights"] for result in pools.run(3, train, case, (1,), precision)])
    exact = run_oracle(case)[0]
    assert_equal_weights(three, one)
    assert any(not np.array_equal(one[name], exact[name].numpy()) for name in one)


@pytest.mark.parametrize("tied", [False, True])
def test_evaluation_sees_the_newest_weights(tied: bool) -> None:
    """Evaluation uses the newest weights, also for both copies of a parameter that two stages share."""
    run = Run(Case(4, dropout=0.3, tied=tied), stages=2)
    for t in range(5):
        run.train(t, t + 1)
        output, whole = run.evaluate(), make_model(0.3, tied=tied).eval()
        whole.load_state_dict(run.strategy.full_state_dict())
        with torch.no_grad():
            np.testing.assert_allclose(output, whole(run.case.batch(0)["x"]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("stages", "changed"),
    [
        pytest.param((2, 1), {"tied": True, "routed": True, "cut": "back"}, id="shared-routed"),
        pytest.param((1, 3), {"bf16": True}, id="masters"),
    ],
)
def test_a_loaded_run_goes_on_as_the_uninterrupted_one(
    stages: tuple[int, int], changed: dict[str, Any], tmp_path: Path
) -> None:
    path, case = str(tmp_path / "run.ckpt"), replace(RESUMED, **changed)
    expected = run_oracle(case, stages[0])[0]
    assert_same_weights([go_through(case, saves=path, at=3, stages=stages[0])], expected)
    assert_same_weights([go_through(case, loads=path, stages=stages[1])], expected)
    saved = torch.load(path, weights_only=True)
    assert saved.keys() == {"model", "optimizer", "scheduler", "step", "pipeline"}
    assert {weight.dtype for weight in saved["model"].values()} == {torch.bfloat16 if case.bf16 else torch.float32}


def test_processes_go_on_as_other_processes(pools: Pools, tmp_path: Path) -> None:
    """Three processes resume from a sharded checkpoint that two processes wrote in the background."""
    path, case = str(tmp_path / "run.ckpt"), replace(RESUMED, tied=True, routed=True, cut="back")  # tied across stages
    expected, saving = run_oracle(case)[0], {"state_dict_type": "sharded", "async_checkpoints": True}
    assert_same_weights(pools.run(2, go_through, case, None, path, 3, (), saving), expected)
    assert_same_weights(pools.run(3, go_through, case, path), expected)


@pytest.mark.parametrize("order", [("optimizer", "model"), ("model", "optimizer")], ids="-".join)
def test_model_and_optimizer_may_be_loaded_one_after_the_other(order: tuple[str, str], tmp_path: Path) -> None:
    path = str(tmp_path / "run.ckpt")
    go_through(RESUMED, saves=path, at=3, stages=2)
    run = Run(RESUMED, spoilt=True, stages=2)
    state = run.state
    for name in order:
        run.fabric.load(path, {name: state.pop(name)})
    assert run.fabric.load(path, state).keys() == set(order)
    run.train(start=state["step"])
    assert_same_weights([run.result()], run_oracle(RESUMED)[0])


def test_a_model_that_is_loaded_later_leaves_the_run_where_it_is(tmp_path: Path) -> None:
    """Unless it follows the optimizer directly, a loaded model replaces all weight versions and keeps the position."""
    path = str(tmp_path / "run.ckpt")
    go_through(RESUMED, saves=path, at=2, stages=2)
    run = Run(RESUMED, stages=2)
    run.load(path)
    engine = run.strategy.session.running()
    assert engine.mini_batch == 2
    run.train(start=2, stop=3)
    run.fabric.load(path, {"model": run.model})
    assert engine.mini_batch == 3
    for part in engine.stages:
        older, newest = part.weights.leaves(2), part.weights.leaves(3)
        assert all(torch.equal(older[name], newest[name]) for name in newest)


def test_many_evaluations_drain_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first of several evaluations drains; otherwise each of them would wait for all stages."""
    run, drained = Run(Case(3), stages=2), []
    drain = run.strategy.session.drain
    monkeypatch.setattr(run.strategy.session, "drain", lambda *args: drained.append(args) or drain(*args))
    for stop in (1, 2):
        run.train(stop - 1, stop)
        for _ in range(3):
            run.evaluate()
        assert len(drained) == stop


def check_copies(run: Run) -> None:
    """Drain, and check that a parameter that both stages share is equal on them in every weight version."""
    run.strategy.drain()
    first, last = (part.weights for part in run.strategy.session.running().stages)
    for version in range(max(0, first.newest - first.num_versions + 1), first.newest + 1):
        assert torch.equal(first.leaves(version)["0.weight"], last.leaves(version)["8.weight"]), version


@pytest.mark.parametrize("holds", [("model",), ("model", "optimizer", "step")])
def test_weights_loaded_in_the_middle_are_the_copys_too(tmp_path: Path, holds: tuple[str, ...]) -> None:
    """Both copies get the weights of a checkpoint that has only the model, or lacks the pipeline's entry."""
    run, path = Run(Case(4, tied=True, batch_sizes=(8,) * 9), stages=2), tmp_path / "saved"
    run.train(0, 2)
    run.fabric.save(path, run.state)
    saved = torch.load(path, weights_only=True)
    torch.save({name: saved[name] for name in holds}, path)
    run.train(2, 5)
    run.fabric.load(path, {name: run.state[name] for name in holds})
    check_copies(run)
    run.train(5, 7)
    check_copies(run)


def test_options_of_steps_before_a_load_are_forgotten(tmp_path: Path) -> None:
    run = Run(Case(4, tied=True, optimizer="counting", batch_sizes=(4,) * 9), stages=2)
    run.train(0, 2)
    run.strategy.drain()
    run.fabric.save(tmp_path / "saved", run.state)
    run.train(2, 7)
    run.fabric.load(tmp_path / "saved", run.state)
    run.train(7, 9)
    run.strategy.drain()
    assert run.optimizer.param_groups[0]["count"] == 4


def told_to_end(case: Case, path: str, told: tuple[int, ...], at: int) -> int:
    """Train until all ranks agree to stop, save, and return the steps; ranks in ``told`` get SIGTERM at step ``at``."""
    run = Run(case)
    before = signal.signal(signal.SIGTERM, lambda *_: run.strategy.request_stop())
    try:
        while not run.strategy.stop_agreed:
            if len(run.norms) == at and run.mesh.rank in told:
                os.kill(os.getpid(), signal.SIGTERM)
            run.train(start=len(run.norms), stop=len(run.norms) + 1)
        run.fabric.save(path, run.state)
    finally:
        signal.signal(signal.SIGTERM, before)
    return len(run.norms)


def test_ranks_that_are_told_to_end_agree_and_resume(pools: Pools, tmp_path: Path) -> None:
    """SIGTERM on some ranks, at any moment, ends the loop on all ranks after the same mini-batch."""
    path = str(tmp_path / "told.ckpt")
    steps = pools.run(3, told_to_end, RESUMED, path, (1, 2), 3)
    assert steps in ([4] * 3, [5] * 3, [6] * 3)
    assert_same_weights(pools.run(3, go_through, RESUMED, path), run_oracle(RESUMED)[0])


def averaged(path: str, resumes: bool) -> dict[str, Any]:
    """Train with an average of weights, save after the first half or resume there; return this rank's part of it."""
    run = Run(Case(microbatches=3))
    average = AveragedModel(run.model.module).requires_grad_(False)
    state = {**run.state, "average": average}
    if resumes:
        run.fabric.load(path, state)
    for start in (2,) if resumes else (0, 2):
        run.train(start, start + 2)
        run.strategy.drain()
        average.update_parameters(run.model)
        if not start:
            run.fabric.save(path, state)
    return arrays(average.state_dict())


def test_averages_are_saved_by_all_stages_and_each_gets_its_own(pools: Pools, tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    first = merged(pools.run(3, averaged, path, False))
    assert_equal_weights(merged(pools.run(2, averaged, path, True)), first)


def train_without_a_batch(stages: int, accumulate: int, delay: int, skip: bool) -> dict[str, np.ndarray]:
    """Train without mini-batch 3: leave it out of the data (``skip``), or drop its gradient."""
    run = Run(Case(3, delay=delay, accumulate=accumulate, batch_sizes=(6,) * 7 * accumulate), stages=stages)
    run.train(stop=3)
    for index in () if skip else run.case.mini_batches[3]:
        run.strategy.training_step(run.case.step(run.model), run.case.batch(index))
    run.optimizer.zero_grad()
    run.train(start=4)
    return run.result()["weights"]


@pytest.mark.parametrize(("stages", "accumulate", "delay"), [(1, 2, 0), (3, 1, 0), (2, 1, 1)])
def test_zero_grad_in_the_place_of_a_step_leaves_the_batch_out(stages: int, accumulate: int, delay: int) -> None:
    assert_equal_weights(*(train_without_a_batch(stages, accumulate, delay, skip) for skip in (False, True)))


def test_the_command_line_still_finds_an_optimizer_by_its_name() -> None:
    """Fabric's optimizer gets a class of that name whose ``zero_grad`` drops gradients, yet the name is unambiguous."""
    run = Run(Case(3), stages=2)
    assert isinstance(run.optimizer.optimizer, torch.optim.AdamW)
    parser = ArgumentParser()
    parser.add_argument("--optimizer", type=OptimizerCallable)
    assert parser.parse_args(["--optimizer=AdamW"]).optimizer.class_path == "torch.optim.AdamW"


def recorded(folder: str) -> None:
    """Record a trace of a training, and check that nothing is recorded afterwards."""
    run = Run(Case(microbatches=4, batch_sizes=(8,) * 6))
    with run.strategy.record_trace(folder):
        run.train(evaluate_after=(2,))
        run.strategy.drain()
    assert run.strategy.session.running().runner.trace is None


def test_a_loop_is_recorded(pools: Pools, tmp_path: Path) -> None:
    pools.run(2, recorded, str(tmp_path / "trace"))
    run = read_run(tmp_path / "trace")
    assert not off_schedule(run)
    assert summarise(run).total.staleness == 1
    for rank in run.ranks:
        kinds = {kind: [s.index for s in rank.spans if s.kind is kind] for kind in (*Kind, *Wait, *Activity)}
        assert kinds[Kind.UPDATE] == list(range(6))
        assert sorted(kinds[Kind.FORWARD]) == sorted(kinds[Kind.BACKWARD])
        assert kinds[Wait.DATA] == [1, 2, 3, 3, 4, 5]
        assert kinds[Activity.EVALUATE] == [3]
