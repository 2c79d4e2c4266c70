"""A parameter of two stages in one process: its copy follows whatever is loaded, written or evaluated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_asyncpp.core.local import LocalPipeline
from tests.helpers.cases import Case
from tests.helpers.fabric import Run

CASE = Case(4, tied=True, batch_sizes=(8,) * 9)
FIRST, LAST = "0.weight", "8.weight"  # one parameter


def check_copies(run: Run) -> None:
    engine = run.strategy.session.running()
    assert isinstance(engine, LocalPipeline)
    first, last = (part.weights for part in engine.engines)
    for version in range(max(0, first.newest - first.room + 1), first.newest + 1):
        assert torch.equal(first.leaves(version)[FIRST], last.leaves(version)[LAST]), version


@pytest.mark.parametrize("holds", [("model",), ("model", "optimizer", "step")])
def test_weights_loaded_in_the_middle_are_the_copys_too(tmp_path: Path, holds: tuple[str, ...]) -> None:
    """Of a checkpoint of the model alone, or of one without the pipeline's entry."""
    run, path = Run(CASE, stages=2), tmp_path / "saved"
    run.train(0, 2)
    run.fabric.save(path, run.state)
    saved = torch.load(path, weights_only=True)
    torch.save({name: saved[name] for name in holds}, path)
    run.train(2, 5)
    run.fabric.load(path, {name: run.state[name] for name in holds})
    run.strategy.drain()
    check_copies(run)
    run.train(5, 7)
    run.strategy.drain()
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


def test_evaluation_runs_on_the_trained_weights_of_the_copy() -> None:
    run = Run(Case(4, tied=True, bf16=True, optimizer="muon", error_feedback=1.0, batch_sizes=(8,) * 6), stages=2)
    run.train()
    run.strategy.drain()
    newest = run.strategy.session.running().weights.shown()[FIRST]
    seen: list[Tensor] = []
    for layer in (run.model.module[0], run.model.module[8]):
        layer.register_forward_pre_hook(lambda module, _: seen.append(module.weight.detach().clone()))
    run.evaluate()
    assert seen
    assert all(weight.dtype == newest.dtype and torch.equal(weight, newest) for weight in seen)
