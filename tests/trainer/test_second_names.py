"""Parameters under second names outside of the layers: trained and saved under all of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import Callback

from lightning_asyncpp import check_model
from tests.helpers.cases import DIM
from tests.helpers.modules import SECOND_NAMES_RUN, Second, SecondNet
from tests.helpers.oracle import assert_equal_weights, mini_batches_of, oracle
from tests.helpers.pool import Pools
from tests.helpers.resumable import saving
from tests.helpers.trainer import Run, arrays, assert_refused, delayed, fit, refusals, train

NAMES = ("model.scale", "model.begin.scale", "model.shared.weight", "model.end.weight", "head_weight", "twin.scale")


class KeepsState(Callback):
    """Puts the whole module's state where :func:`run_of` finds it."""

    def __init__(self, into: dict[str, Any]) -> None:
        self.into = into

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.into |= arrays(module.state_dict())


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    """What one process has in its ``state_dict`` after the same training."""
    state: dict[str, np.ndarray] = {}
    run = replace(delayed(SECOND_NAMES_RUN, microbatches=4), callbacks=((KeepsState, {"into": state}),))
    train(replace(run, trainer=SECOND_NAMES_RUN.trainer | {"enable_checkpointing": False}))
    return state


def test_one_process_is_the_reference(expected: dict[str, np.ndarray]) -> None:
    weights, _ = oracle(SECOND_NAMES_RUN, 4, list(mini_batches_of(SECOND_NAMES_RUN, 2)), max_norm=0.4)
    assert_equal_weights({name: expected[name] for name in weights}, weights)
    assert not np.array_equal(expected["model.scale"], arrays(SecondNet(SECOND_NAMES_RUN).state_dict())["model.scale"])
    assert all(name in expected for name in NAMES)


@pytest.mark.parametrize("stages", [3, *(pytest.param(few, marks=pytest.mark.slow) for few in (1, 2))])
def test_all_names_hold_the_trained_values(
    pools: Pools, stages: int, expected: dict[str, np.ndarray], tmp_path: Path
) -> None:
    results = pools.run(stages, fit, replace(SECOND_NAMES_RUN, callbacks=(saving(tmp_path, every_n_train_steps=5),)))
    assert_equal_weights(results[0]["full_afterwards"], expected)
    # What stage 0 does not hold is not in its named_parameters() either.
    assert all("scale" not in name for result in results[: stages - 1] for name in result["weights"])
    checkpoint = torch.load(tmp_path / "step=10.ckpt", weights_only=True)
    assert_equal_weights(arrays(checkpoint["state_dict"]), expected)
    assert len({checkpoint["state_dict"][name].data_ptr() for name in NAMES[2:4]}) == 1
    SecondNet(SECOND_NAMES_RUN).load_state_dict(checkpoint["state_dict"])


def test_one_process_knows_stages_by_the_names_in_layers(pools: Pools) -> None:
    """The first name of the scale, the model's own, is of no layer; as on the last stage it would not be old at all."""
    options = {"microbatches": 4, "staleness": "least", "partition": [2, 3]}
    results = pools.run(2, fit, replace(SECOND_NAMES_RUN, options=options))
    state: dict[str, np.ndarray] = {}
    run = delayed(SECOND_NAMES_RUN, staleness="least", stages=2, microbatches=4, partition=[2, 3])
    train(replace(run, callbacks=((KeepsState, {"into": state}),)))
    assert_equal_weights(results[0]["full_afterwards"], state)


@pytest.mark.parametrize("form", [pytest.param("full", marks=pytest.mark.slow), "sharded"])
def test_a_run_goes_on_with_other_stages(
    pools: Pools, form: str, expected: dict[str, np.ndarray], tmp_path: Path
) -> None:
    options = SECOND_NAMES_RUN.options | {"state_dict_type": form}
    pools.run(2, fit, replace(SECOND_NAMES_RUN, options=options, callbacks=(saving(tmp_path, every_n_train_steps=3),)))
    results = pools.run(3, fit, replace(SECOND_NAMES_RUN, ckpt_path=str(tmp_path / "step=3.ckpt")))
    assert_equal_weights(results[0]["full_afterwards"], expected)


def test_names_that_disagree_are_refused(pools: Pools, tmp_path: Path) -> None:
    pools.run(
        2,
        fit,
        replace(SECOND_NAMES_RUN, trainer=SECOND_NAMES_RUN.trainer | {"max_epochs": 1}, callbacks=(saving(tmp_path),)),
    )
    checkpoint = torch.load(path := tmp_path / "step=5.ckpt", weights_only=True)
    checkpoint["state_dict"]["model.scale"] = torch.zeros(DIM)
    torch.save(checkpoint, path)
    outcomes = refusals(pools, replace(SECOND_NAMES_RUN, ckpt_path=str(path)))
    assert_refused(outcomes, "model.scale and model.begin.scale are one parameter in this model, but differ")


@pytest.mark.parametrize("stages", [1, 2])
def test_versions_in_bf16_beside_masters(pools: Pools, stages: int) -> None:
    run = replace(
        SECOND_NAMES_RUN,
        options=SECOND_NAMES_RUN.options | {"weight_dtype": "bf16"},
        trainer={"precision": "bf16-mixed"},
    )
    results = pools.run(stages, fit, run)
    state = results[0]["full_at_end"]
    assert np.array_equal(state["model.scale"], state["model.begin.scale"])
    assert np.array_equal(state["model.shared.weight"], state["model.end.weight"])
    assert np.array_equal(state["head_weight"], state["model.head.weight"])


def test_check_model_says_the_same() -> None:
    batches = [{"x": torch.randn(8, DIM), "y": torch.randn(8, 1)}]
    assert check_model(SecondNet(SECOND_NAMES_RUN), batches, stages=3, microbatches=4).bitwise


class UsedBetween(Second):
    """A layer's function uses what one layer before it holds and one behind it."""

    def pipeline_layers(self) -> list[Any]:
        first, second = self.blocks
        return [self.begin, first, (second, lambda block, x: block(x) + self.shared(x)), self.end, self.head]


class UsedBetweenNet(SecondNet):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.twin = self.model = UsedBetween()
        self.head_weight = self.model.head.weight


@pytest.mark.parametrize("partition", [[3, 2], [4, 1], [3, 1, 1]])
def test_a_name_means_the_last_layer_before_that_holds_it(pools: Pools, partition: list[int]) -> None:
    run = replace(
        SECOND_NAMES_RUN, module=UsedBetweenNet, options=SECOND_NAMES_RUN.options | {"partition": partition}, trainer={}
    )
    state: dict[str, np.ndarray] = {}
    train(replace(delayed(run, microbatches=4), callbacks=((KeepsState, {"into": state}),)))
    results = pools.run(len(partition), fit, run)
    assert_equal_weights(results[0]["full_afterwards"], state)
