"""Models, loaders and loops are set up in the same way on every rank and for every number of stages."""

from __future__ import annotations

import os
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_asyncpp.core.cut.cutting import materialize
from lightning_asyncpp.core.cut.units import pipeline_units
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.fabric import AsyncPipelineStrategy, DelayedGradientStrategy
from lightning_asyncpp.models import GPT, GPTConfig
from tests.helpers.cases import Case, make_model
from tests.helpers.fabric import Run, make_fabric
from tests.helpers.oracle import assert_equal_weights
from tests.helpers.pool import Pools
from tests.helpers.trainer import arrays

CONFIG = GPTConfig(vocab_size=11, context_length=4, num_layers=3, dim=8, num_heads=2)


def initial_weights(empty_init: bool) -> tuple[dict[str, np.ndarray], int, str, int]:
    """Return gathered initial weights, this rank's number of parameters, the device they were built on and the seed."""
    strategy = AsyncPipelineStrategy()
    fabric = make_fabric(strategy, seed=3)
    with fabric.init_module(empty_init=empty_init):
        model = GPT(CONFIG)
    device = next(model.parameters()).device.type
    if not empty_init:
        os.environ.pop("PL_GLOBAL_SEED")
    wrapped = fabric.setup_module(model)
    own = sum(1 for p in wrapped.parameters() if p.stride() != (0,) * p.ndim)
    return arrays(strategy.full_state_dict()), own, device, strategy.session.seed


def test_meta_layers_are_initialised_from_the_seed(pools: Pools) -> None:
    results = pools.run(3, initial_weights, True)
    with torch.device("meta"):
        expected = GPT(CONFIG)
    materialize(pipeline_units(expected), range(5), 3, torch.device("cpu"))
    assert_equal_weights(results[0][0], arrays(expected.state_dict()))
    assert sum(count for _, count, _, _ in results) == len(list(expected.parameters()))
    assert {device for _, _, device, _ in results} == {"meta"}


def test_real_weights_are_kept_and_ranks_share_a_drawn_seed_if_there_is_none(pools: Pools) -> None:
    results = pools.run(2, initial_weights, False)
    torch.manual_seed(3)
    assert_equal_weights(results[0][0], arrays(GPT(CONFIG).state_dict()))
    assert {device for _, _, device, _ in results} == {"cpu"}
    assert results[0][3] == results[1][3]


def test_clip_val_bounds_every_element() -> None:
    strategy = DelayedGradientStrategy(2, delay=0)
    fabric = make_fabric(strategy)
    model = fabric.setup_module(make_model())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=1.0))
    before = [p.detach().clone() for p in model.parameters()]
    fabric.clip_gradients(model, optimizer, clip_val=1e-3)
    with fabric.no_backward_sync(model):  # without effect
        optimizer.step(lambda: strategy.training_step(Case(2).step(model), Case(2).batch(0)))
    changes = torch.cat([(p.detach() - b).abs().flatten() for p, b in zip(model.parameters(), before)])
    assert changes.max().item() == pytest.approx(1e-3, rel=1e-3)
    assert changes.median().item() == pytest.approx(1e-3, rel=1e-3)


class Unsized(IterableDataset):
    """Iterable dataset without a length."""

    def __iter__(self) -> Any:
        return iter(torch.arange(12.0).view(6, 2))


def loaders(replicas: int) -> dict[str, Any]:
    """Return what this rank reads from a shuffled loader in two epochs and from a stream, and what its workers draw."""
    strategy = AsyncPipelineStrategy(data_parallel_size=replicas)
    fabric = make_fabric(strategy, seed=3)
    torch.manual_seed(7)
    shuffled: Any = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.arange(24)), batch_size=4, shuffle=True))
    stream = fabric.setup_dataloaders(DataLoader(Unsized(), batch_size=2))
    read = {
        "length": (len(shuffled), len(shuffled.dataset), shuffled.batch_size),
        "epochs": [[repr(batch) for batch in shuffled] for _ in range(2)],
        "stream": [repr(batch) for batch in stream],
    }
    torch.manual_seed(1)
    shuffled.worker_init_fn(0)
    return {**read, "augmentation": random.random()}


def test_loaders_give_all_stages_of_a_replica_the_same(pools: Pools) -> None:
    ranks = pools.run(4, loaders, 2)
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    assert ranks[0]["length"] == (3, 24, 4)
    for key in ("epochs", "augmentation"):
        assert ranks[0][key] != ranks[2][key]
    for rank in ranks:
        assert rank["epochs"][0] != rank["epochs"][1], "shuffled anew in every epoch"


def test_middle_stages_read_nothing(pools: Pools) -> None:
    last, middle, first = pools.run(3, loaders, 1)
    assert last["epochs"] == first["epochs"]
    assert middle["length"] == first["length"]
    assert all("no batch" in batch for epoch in middle["epochs"] for batch in epoch)
    assert middle["stream"] == first["stream"], "a loader without a length is read to know when it ends"


def local_state() -> list[str]:
    """Return the keys of ``state_dict()`` on the last stage; calling it there must not wait for other ranks."""
    run = Run(Case(3, scheduler=True))
    with pytest.raises(ConfigurationError, match="outside of a step: this rank has only its stage"):
        run.model(torch.zeros(1, 2))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step")
        run.train(stop=2)
    return list({**run.model.state_dict(), **run.optimizer.state_dict()}) if run.mesh.is_last else []


def test_state_dicts_are_local(pools: Pools) -> None:
    last, _ = pools.run(2, local_state)
    assert "state" in last
    assert any(key.endswith("weight") for key in last)
