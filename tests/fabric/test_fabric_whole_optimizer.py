"""Optimizers of the whole model in Fabric, made before the model is set up, after it, or set up together with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_asyncpp.fabric import SyncPipelineStrategy
from tests.core.cases import Case, make_model
from tests.fabric.runs import make_fabric
from tests.trainer.pool import Pools


def train(when: str) -> dict[str, np.ndarray]:
    """With a rate by the number of parameters of the whole model."""
    strategy = SyncPipelineStrategy(micro_batches=2)
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
    strategy.flush()
    return {name: value.numpy() for name, value in strategy.full_state_dict().items()}


@pytest.mark.parametrize("when", ["before", "after", "together"])
def test_trains_as_one_stage(pools: Pools, when: str) -> None:
    [expected] = pools.run(1, train, "after")
    found = pools.run(2, train, when)[0]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-6)
