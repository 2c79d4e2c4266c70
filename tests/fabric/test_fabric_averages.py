"""Averages of weights in Fabric: what stages save beside model and optimizer is all stages', and each gets its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from tests.core.cases import Case, make_model
from tests.fabric.runs import Run
from tests.trainer.pool import Pools


class Tracker:
    """An average of a user's own, with state."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model: torch.nn.Module) -> None:
        for name, p in model.named_parameters():
            self.shadow[name].lerp_(p.detach(), 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


def averaged(loads: str | None, saves: str, start: int, stop: int) -> dict[str, Any]:
    """Train with two averages, from a checkpoint or not, and save; what this rank has of them."""
    run = Run(Case(micro_batches=3))
    average, tracker = AveragedModel(run.model.module).requires_grad_(False), Tracker(run.model)
    plain: dict[str, Any] = {"plain": {"stage": run.mesh.stage}}
    state = {**run.state, "average": average, "tracker": tracker, **plain}
    if loads:
        run.fabric.load(loads, state)
        assert state["plain"]["stage"] == run.mesh.stage or run.mesh.num_stages != 3
    run.train(start, stop)
    run.strategy.flush()
    average.update_parameters(run.model)
    tracker.update(run.model)
    run.fabric.save(saves, state)
    found = {f"average.{name}": tensor for name, tensor in average.state_dict().items()}
    found |= {f"tracker.{name}": tensor for name, tensor in tracker.shadow.items()}
    return {name: tensor.numpy().copy() for name, tensor in found.items()}


def joined(results: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: array for result in results for name, array in result.items()}


@pytest.mark.parametrize("resumed_on", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_averages_go_on(pools: Pools, tmp_path: Path, resumed_on: int) -> None:
    half, end = str(tmp_path / "half.ckpt"), str(tmp_path / "end.ckpt")
    pools.run(3, averaged, None, half, 0, 2)
    first = pools.run(3, averaged, half, end, 2, 4)
    again = pools.run(resumed_on, averaged, half, end, 2, 4)
    assert joined(again).keys() == joined(first).keys()
    for name, array in joined(first).items():
        np.testing.assert_array_equal(joined(again)[name], array, err_msg=name)
    for result in again:
        trackers = {name.removeprefix("tracker._forward_module.") for name in result if name.startswith("tracker.")}
        averages = {n.removeprefix("average.module.") for n in result if n.startswith("average.module.")}
        assert trackers == averages, "an average of what another stage trains grows stale"


def made_too_early() -> None:
    run = Run(Case(micro_batches=3))
    AveragedModel(make_model()).update_parameters(run.model)


def test_an_average_of_the_whole_model_is_refused(pools: Pools) -> None:
    for outcome in pools.outcomes(3, made_too_early):
        assert outcome.error == "ConfigurationError"
        assert "after fabric.setup_optimizers" in outcome.message
