"""Parameters under second names outside of the layers, and a network under another name than ``model``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_asyncpp import ConfigurationError
from tests.helpers.cases import DIM
from tests.helpers.modules import SECOND_NAMES_RUN, Second, SecondNet
from tests.helpers.oracle import assert_equal_weights, joined_weights, mini_batches_of, oracle
from tests.helpers.pool import Pools
from tests.helpers.resumable import saving
from tests.helpers.trainer import Net, Run, arrays, fit, staged, train

NAMES = ("model.scale", "model.begin.scale", "model.shared.weight", "model.end.weight", "head_weight", "twin.scale")


def state_of(run: Run) -> dict[str, np.ndarray]:
    """What one process has in its ``state_dict`` after the same training."""
    made: list[Any] = []

    def kept(given: Run) -> Any:
        made.append(run.module(given))
        return made[0]

    train(replace(run, module=kept))
    return arrays(made[0].state_dict())


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    return state_of(staged(SECOND_NAMES_RUN, 1))


def test_one_process_is_the_oracle(expected: dict[str, np.ndarray]) -> None:
    weights, _ = oracle(SECOND_NAMES_RUN, 4, list(mini_batches_of(SECOND_NAMES_RUN, 2)), max_norm=0.4)
    assert_equal_weights({name: expected[name] for name in weights}, weights)
    assert not np.array_equal(expected["model.scale"], arrays(SecondNet(SECOND_NAMES_RUN).state_dict())["model.scale"])
    assert_equal_weights(state_of(staged(SECOND_NAMES_RUN)), expected)


def test_all_names_hold_the_trained_values(pools: Pools, expected: dict[str, np.ndarray], tmp_path: Path) -> None:
    """Afterwards, in a checkpoint, and after going on from it with another number of stages."""
    saves = (saving(tmp_path, every_n_train_steps=3),)
    results = pools.run(3, fit, replace(SECOND_NAMES_RUN, callbacks=saves))
    assert_equal_weights(results[0]["full_afterwards"], expected)
    # What stage 0 does not hold is not in its named_parameters() either.
    assert all("scale" not in name for result in results[:2] for name in result["weights"])
    checkpoint = torch.load(path := tmp_path / "step=3.ckpt", weights_only=True)
    state = checkpoint["state_dict"]
    assert len({state[name].data_ptr() for name in NAMES[2:4]}) == len({state[n].data_ptr() for n in NAMES[:2]}) == 1
    SecondNet(SECOND_NAMES_RUN).load_state_dict(state)
    going_on = replace(SECOND_NAMES_RUN, ckpt_path=str(path))
    assert_equal_weights(pools.run(2, fit, going_on)[0]["full_afterwards"], expected)
    state["model.scale"] = torch.zeros(DIM)
    torch.save(checkpoint, path)
    with pytest.raises(ConfigurationError, match=r"model\.scale and model\.begin\.scale are one parameter"):
        train(staged(going_on))


def test_versions_in_bf16_beside_masters(pools: Pools) -> None:
    options = SECOND_NAMES_RUN.options | {"weight_dtype": "bf16"}
    run = replace(SECOND_NAMES_RUN, options=options, trainer={"precision": "bf16-mixed"})
    state = pools.run(2, fit, run)[0]["full_at_end"]
    for one, other in (NAMES[:2], NAMES[2:4], ("head_weight", "model.head.weight")):
        assert np.array_equal(state[one], state[other])


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
def test_a_name_means_the_last_layer_before_that_holds_it(partition: list[int]) -> None:
    run = replace(SECOND_NAMES_RUN, module=UsedBetweenNet, trainer={})
    cut = replace(run, options=run.options | {"partition": partition})
    assert_equal_weights(state_of(staged(cut, len(partition))), state_of(staged(run, 1)))


class Backbone(Net):
    """Around a ``self.backbone``; its ``model`` is a text, but for its own steps."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.backbone = self.model
        del self.model
        self.model = "linear layers"  # type: ignore[assignment]

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        return torch.nn.functional.mse_loss(self.backbone(batch["x"]), batch["y"])


def test_a_network_under_another_name_trains_and_resumes(pools: Pools, tmp_path: Path) -> None:
    trainer = {"enable_checkpointing": True, "max_epochs": 2}
    run = Run(Backbone, "default", {"microbatches": 2}, trainer, callbacks=(saving(tmp_path, every_n_train_steps=5),))
    trained = pools.run(2, fit, run)
    usual = train(staged(replace(run, module=Net, callbacks=(), trainer={"max_epochs": 2}), 2))["weights"]
    expected = {name.replace("model.", "backbone."): weights for name, weights in usual.items()}
    assert_equal_weights(joined_weights(trained, 2), expected)
    resumed = pools.run(2, fit, replace(run, callbacks=(), ckpt_path=str(tmp_path / "step=5.ckpt")))
    assert_equal_weights(joined_weights(resumed, 2), expected)
