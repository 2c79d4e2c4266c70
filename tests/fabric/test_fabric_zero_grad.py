"""A Fabric loop that throws gradients away: ``optimizer.zero_grad()`` in the place of ``optimizer.step()``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.fabric import Fabric
from lightning.pytorch.cli import OptimizerCallable
from torch.nn import functional as F

from lightning_asyncpp.fabric import AsyncPipelineStrategy, DelayedGradientStrategy, SyncPipelineStrategy
from tests.helpers.cases import DIM, make_model
from tests.helpers.fabric import make_fabric
from tests.helpers.pool import Pools

DROPPED = 3


def strategy_of(name: str) -> Any:
    if name.isdigit():
        return DelayedGradientStrategy(int(name), microbatches=3, partition="uniform")
    kind = SyncPipelineStrategy if name == "sync" else AsyncPipelineStrategy
    return kind(microbatches=3, partition="uniform")


def train(name: str, accumulate: int, skip: bool) -> dict[str, np.ndarray]:
    """A batch is left out of the data (``skip``), or trained and its gradient thrown away."""
    strategy = strategy_of(name)
    fabric = make_fabric(strategy)
    wrapped = fabric.setup_module(make_model())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(wrapped.parameters(), lr=0.01))
    generator = torch.Generator().manual_seed(1)
    for i in range(7):
        batches = [
            (torch.randn(6, DIM, generator=generator), torch.randn(6, 1, generator=generator))
            for _ in range(accumulate)
        ]
        for batch in () if skip and i == DROPPED else batches:
            strategy.training_step(lambda part: F.mse_loss(wrapped(part[0]), part[1]), batch)
        if i != DROPPED:
            optimizer.step()
        optimizer.zero_grad()
    strategy.drain()
    return {name: p.detach().numpy().copy() for name, p in wrapped.named_parameters()}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stages", [1, 3])
def test_a_synchronous_pipeline_trains_as_if_the_batch_had_not_been(pools: Pools, stages: int, accumulate: int) -> None:
    expected = joined(pools.run(stages, train, "sync", accumulate, True))
    found = joined(pools.run(stages, train, "sync", accumulate, False))
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_stages_of_one_process_drop_what_those_of_several_drop(pools: Pools) -> None:
    expected = joined(pools.run(3, train, "async", 1, False))
    (found,) = pools.run(1, train, "3", 1, False)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def joined(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: array for part in parts for name, array in part.items()}


def test_the_command_line_still_finds_an_optimizer_by_its_name() -> None:
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy_of("2"))
    fabric.launch()
    wrapped = fabric.setup_module(make_model())
    fabric.setup_optimizers(torch.optim.AdamW(wrapped.parameters(), lr=0.01))
    parser = ArgumentParser()
    parser.add_argument("--optimizer", type=OptimizerCallable)
    assert parser.parse_args(["--optimizer=AdamW"]).optimizer.class_path == "torch.optim.AdamW"
