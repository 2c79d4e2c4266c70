"""A Fabric loop whose optimizer is made from the trained parameters, of which some stages have none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from lightning_asyncpp.fabric import AsyncPipelineStrategy, DelayedGradientStrategy
from tests.helpers.cases import DIM, make_model
from tests.helpers.fabric import make_fabric
from tests.helpers.pool import Pools


def train(emulated: int) -> dict[str, np.ndarray]:
    """With so many stages emulated; 0: in a pipeline."""
    local: dict[str, Any] = {"stages": emulated, "microbatches": 3}
    strategy: Any = DelayedGradientStrategy(**local) if emulated else AsyncPipelineStrategy(microbatches=3)
    fabric = make_fabric(strategy)
    model = make_model()
    model[:-1].requires_grad_(False)
    wrapped = fabric.setup_module(model)
    trained = filter(lambda p: p.requires_grad, wrapped.parameters())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(trained, lr=0.01))
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        batch = (torch.randn(6, DIM, generator=generator), torch.randn(6, 1, generator=generator))
        strategy.training_step(lambda part: F.mse_loss(wrapped(part[0]), part[1]), batch)
        optimizer.step()
    strategy.drain()
    return {name: p.detach().numpy() for name, p in wrapped.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("stages", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_stages_that_train_nothing(pools: Pools, stages: int) -> None:
    [expected] = pools.run(1, train, stages)
    parts = pools.run(stages, train, 0)
    joined = {name: array for part in parts for name, array in part.items()}
    assert joined.keys() == expected.keys()
    assert all(np.array_equal(joined[name], expected[name]) for name in joined)
