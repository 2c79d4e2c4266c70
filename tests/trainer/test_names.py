"""Parameters with second names outside of the layers are trained and saved under all names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_asyncpp import ConfigurationError
from tests.helpers.cases import DIM
from tests.helpers.modules import SECOND_NAMES_RUN, SecondNet
from tests.helpers.oracle import assert_equal_weights, mini_batches_of, oracle
from tests.helpers.pool import Pools
from tests.helpers.resumable import saving
from tests.helpers.trainer import arrays, fit, staged, train


def test_all_names_hold_the_trained_values(pools: Pools, tmp_path: Path) -> None:
    """All names hold the trained value after training, in a checkpoint, and after a resume with other stages."""
    weights, _ = oracle(SECOND_NAMES_RUN, 4, list(mini_batches_of(SECOND_NAMES_RUN, 2)), max_norm=0.4)
    module = SecondNet(SECOND_NAMES_RUN)
    train(staged(replace(SECOND_NAMES_RUN, module=lambda _: module), 1))
    expected = arrays(module.state_dict())
    assert_equal_weights({name: expected[name] for name in weights}, weights)
    results = pools.run(3, fit, replace(SECOND_NAMES_RUN, callbacks=(saving(tmp_path, every_n_train_steps=3),)))
    assert_equal_weights(results[0]["full_afterwards"], expected)
    # Only stage 0, on rank 2, holds the scale; it is not in the named_parameters() of the other stages.
    assert all("scale" not in name for result in results[:2] for name in result["weights"])
    checkpoint = torch.load(path := tmp_path / "step=3.ckpt", weights_only=True)
    state = checkpoint["state_dict"]
    older = checkpoint["pipeline"]["older_weights"]
    for one, other in (("scale", "begin.scale"), ("shared.weight", "end.weight")):
        assert state[f"model.{one}"].data_ptr() == state[f"model.{other}"].data_ptr()
    assert older["begin.linear.weight"].data_ptr() == older["end.weight"].data_ptr()
    SecondNet(SECOND_NAMES_RUN).load_state_dict(state)
    going_on = replace(SECOND_NAMES_RUN, ckpt_path=str(path))
    assert_equal_weights(pools.run(2, fit, going_on)[0]["full_afterwards"], expected)
    state["model.scale"] = torch.zeros(DIM)
    torch.save(checkpoint, path)
    with pytest.raises(ConfigurationError, match=r"model\.scale and model\.begin\.scale are one parameter"):
        train(staged(going_on))
