"""Optimizers of the whole model in Fabric, made before the model is set up, after it, or set up together with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch

from lightning_asyncpp.fabric import SyncPipelineStrategy
from tests.helpers.cases import Case, make_model
from tests.helpers.fabric import make_fabric
from tests.helpers.pool import Pools


def train(when: str) -> dict[str, np.ndarray]:
    """With a rate by the number of parameters of the whole model."""
    strategy = SyncPipelineStrategy(microbatches=2)
    fabric = make_fabric(strategy, seed=3)
    made: Any = make_model()

    def optimizer_of(model: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=2.0 / sum(p.numel() for p in model.parameters()))

    if when == "together":
        model, optimizer = fabric.setup(made, optimizer_of(made))
    elif when == "before":
        optimizer = optimizer_of(made)
        model = fabric.setup_module(made)
        optimizer = fabric.setup_optimizers(optimizer)
    else:
        model = fabric.setup_module(made)
        optimizer = fabric.setup_optimizers(optimizer_of(model))
    for index in range(3):
        strategy.training_step(Case(2).step(model), Case(2).batch(index))
        optimizer.step()
    strategy.drain()
    return {name: value.numpy() for name, value in strategy.full_state_dict().items()}


@pytest.mark.parametrize("when", ["before", "after", "together"])
def test_trains_as_one_stage(pools: Pools, when: str) -> None:
    [expected] = pools.run(1, train, "after")
    found = pools.run(2, train, when)[0]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-6)


def go_on(stages: bool, source: Path | None = None, target: Path | None = None) -> dict[str, np.ndarray]:
    """Train by batches 0 to 2, and save; or load, and train by 3 to 5; over stages, or in plain Fabric."""
    case, strategy = Case(2, batch_sizes=(8,) * 6), SyncPipelineStrategy(microbatches=2)
    fabric = make_fabric(strategy, seed=3) if stages else L.Fabric(accelerator="cpu", devices=1)
    made = make_model()
    model, optimizer = fabric.setup(made, torch.optim.AdamW(made.parameters(), lr=0.02))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if source is not None:
        fabric.load(source, state)
    for index in range(state["step"], state["step"] + 3):
        if stages:
            strategy.training_step(case.step(model), case.batch(index))
        else:
            fabric.backward(case.step(model)(case.batch(index)))
        optimizer.step()
        optimizer.zero_grad()
    if target is not None:
        fabric.save(target, {**state, "step": state["step"] + 3})
    weights = strategy.full_state_dict() if stages else model.state_dict()
    return {name: value.numpy() for name, value in weights.items()}


@pytest.mark.parametrize("stages", [2, *(pytest.param(stages, marks=pytest.mark.slow) for stages in (1, 3, 4))])
def test_checkpoints_are_plain_both_ways(pools: Pools, stages: int, tmp_path: Path) -> None:
    """What a pipeline saved a plain Fabric goes on from, with its optimizer, and the other way round."""
    plain, by_stages = tmp_path / "plain.ckpt", tmp_path / "stages.ckpt"
    pools.run(1, go_on, False, None, plain)
    pools.run(stages, go_on, True, None, by_stages)
    [expected] = pools.run(1, go_on, False, plain)
    for found in (pools.run(stages, go_on, True, plain)[0], pools.run(1, go_on, False, by_stages)[0]):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-6)
