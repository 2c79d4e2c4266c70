"""Models, loaders and loops are set up alike on every rank, and for every number of stages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY

import lightning_asyncpp  # noqa: F401  (registers the names)
from lightning_asyncpp.core.cut.cutting import materialize
from lightning_asyncpp.core.cut.units import pipeline_units
from lightning_asyncpp.models import GPT
from tests.fabric import refused, setups
from tests.helpers.compare import assert_same_weights, weights_of
from tests.helpers.pool import Pools


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_meta_layers_are_initialised_from_the_seed(pools: Pools, num_stages: int) -> None:
    results = pools.run(num_stages, setups.initial_weights, True)
    with torch.device("meta"):
        expected = GPT(setups.CONFIG)
    materialize(pipeline_units(expected), range(4), 3, torch.device("cpu"))
    state = expected.state_dict()
    assert results[0][0].keys() == state.keys()
    assert all(np.array_equal(results[0][0][name], value.numpy()) for name, value in state.items())
    assert sum(count for _, count, _ in results) == len(list(expected.parameters()))
    assert {device for _, _, device in results} == {"meta"}


@pytest.mark.parametrize("num_stages", [1, 2])
def test_real_weights_are_kept(pools: Pools, num_stages: int) -> None:
    results = pools.run(num_stages, setups.initial_weights, False)
    torch.manual_seed(3)
    state = GPT(setups.CONFIG).state_dict()
    assert all(np.array_equal(results[0][0][name], value.numpy()) for name, value in state.items())
    assert {device for _, _, device in results} == {"cpu"}


def test_layers_are_measured_with_an_example(pools: Pools) -> None:
    assert pools.run(2, setups.measured_layers) == [((1, 4), "by measured times")] * 2


def test_without_seed_everything_all_ranks_share_a_drawn_seed(pools: Pools) -> None:
    seeds = pools.run(3, setups.seed_without_seed_everything)
    assert len(set(seeds)) == 1


def test_the_step_may_call_the_original_module(pools: Pools) -> None:
    wrapped, original = (pools.run(2, setups.original_module_in_the_step, flag) for flag in (True, False))
    assert_same_weights(wrapped, {name: torch.tensor(value) for name, value in weights_of(original).items()})


@pytest.mark.slow
def test_a_model_that_was_compiled_trains_as_it_does_without(pools: Pools) -> None:
    compiled, plain = (pools.run(2, setups.compiled_as_a_whole, flag) for flag in (True, False))
    assert_same_weights(compiled, {name: torch.tensor(value) for name, value in weights_of(plain).items()})


@pytest.mark.parametrize(("name", "delay"), [("async_pipeline", 1), ("sync_pipeline", 0)])
def test_strategies_have_names(pools: Pools, name: str, delay: int) -> None:
    assert name in STRATEGY_REGISTRY.available_strategies()
    last, first = pools.run(2, setups.by_name, name)
    assert last[1] == first[1] == delay
    assert last[2][3] < last[2][0]
    assert first[2] == []


def test_clip_val_bounds_every_element(pools: Pools) -> None:
    for largest, typical in pools.run(2, setups.clipped_by_value):
        assert largest == pytest.approx(1e-3, rel=1e-3)
        assert typical == pytest.approx(1e-3, rel=1e-3)


def test_hooks_are_taken_from_the_model(pools: Pools) -> None:
    last, first = pools.run(2, setups.hooks_of_the_model)
    assert first is None
    assert last == pytest.approx(4 * 4 * 15.0 / (2 * 4))


def test_loaders_give_all_stages_of_a_replica_the_same(pools: Pools) -> None:
    ranks = pools.run(4, setups.loaders, 2)
    for replica in (0, 1):
        first, last = (rank for rank in ranks if rank["replica"] == replica)
        for key in ("length", "epochs", "stream", "augmentation"):
            assert first[key] == last[key]
        assert first["epochs"][0] != first["epochs"][1], "shuffled anew in every epoch"
    assert ranks[0]["length"] == (3, 24, 4)
    assert ranks[0]["epochs"] != ranks[2]["epochs"]
    assert ranks[0]["augmentation"] != ranks[2]["augmentation"]


def test_middle_stages_read_nothing(pools: Pools) -> None:
    last, middle, first = pools.run(3, setups.loaders, 1)
    assert (last["reads"], middle["reads"], first["reads"]) == (True, False, True)
    assert last["epochs"] == first["epochs"]
    assert middle["length"] == first["length"]
    assert all("no batch" in batch for epoch in middle["epochs"] for batch in epoch)
    assert middle["stream"] == first["stream"], "a loader without a length is read to know when it ends"


@pytest.mark.parametrize("num_stages", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_training_from_loaders_does_not_depend_on_the_number_of_stages(pools: Pools, num_stages: int) -> None:
    expected = pools.run(1, setups.train_from_loaders)[0]
    assert pools.run(num_stages, setups.train_from_loaders)[0] == pytest.approx(expected, rel=1e-6)


def test_state_dicts_are_local(pools: Pools) -> None:
    last, first = pools.run(2, setups.local_state)
    assert "state" in last["keys"]
    assert any(key.endswith("weight") for key in last["keys"])
    assert first["keys"] == []
    assert last["norm"] == first["norm"] > 0
    assert not [text for text in last["warnings"] + first["warnings"] if "lr_scheduler.step" in text]


@pytest.mark.parametrize("num_stages", [1, 3])
def test_weights_alone_load_into_any_number_of_stages(pools: Pools, tmp_path: Path, num_stages: int) -> None:
    path = str(tmp_path / "two.ckpt")
    pools.run(2, refused.save, path)
    loaded = pools.run(num_stages, setups.load_weights_alone, path)[0]
    saved = torch.load(path, weights_only=True)["model"]
    assert loaded.keys() == saved.keys()
    assert all(np.array_equal(loaded[name], value.numpy()) for name, value in saved.items())
