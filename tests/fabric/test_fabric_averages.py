"""Averages of weights in Fabric: what stages save beside model and optimizer is all stages', and each gets its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.optim.swa_utils import AveragedModel

from tests.helpers.cases import Case
from tests.helpers.fabric import Run
from tests.helpers.pool import Pools


def averaged(loads: str | None, saves: str, start: int, stop: int) -> dict[str, Any]:
    """Train with an average, from a checkpoint or not, and save; what this rank has of them."""
    run = Run(Case(microbatches=3))
    average = AveragedModel(run.model.module).requires_grad_(False)
    state = {**run.state, "average": average}
    if loads:
        run.fabric.load(loads, state)
    run.train(start, stop)
    run.strategy.drain()
    average.update_parameters(run.model)
    run.fabric.save(saves, state)
    return {name: tensor.numpy().copy() for name, tensor in average.state_dict().items()}


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
