"""Weights shared by two stages, losses that layers add, and buffers that they change: as in one process, bitwise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.cases import make_model
from tests.helpers.oracle import assert_equal_weights, joined_weights, mini_batches_of, oracle
from tests.helpers.pool import Pools
from tests.helpers.resumable import RESUMABLE_TRAINER, ResumableNet, saving
from tests.helpers.trainer import Net, Run, fit, staged, train


class SharingNet(Net):
    train_dataloader = ResumableNet.train_dataloader

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model = make_model(run.dropout, tied=True, routed=True)


RUN = Run(
    SharingNet, "async", {"microbatches": 4}, optimizer="muon", error_feedback=True, dropout=0.2, samples=37,
    trainer={"max_epochs": 2, "gradient_clip_val": 0.4, "logger": "list"},
)  # fmt: skip


def logged(result: dict[str, Any], name: str) -> dict[int, float]:
    return {step: metrics[name] for step, metrics in result["records"] if name in metrics}


def test_stages_in_one_process_are_the_oracle() -> None:
    three, one = (train(staged(RUN, stages)) for stages in (3, 1))
    weights, losses = oracle(RUN, 4, list(mini_batches_of(RUN, 2)), max_norm=0.4)
    assert_equal_weights(three["weights"], weights)
    assert three["losses"] == pytest.approx(losses, rel=1e-6)
    for name in ("samples", "busiest"):
        assert logged(three, name) == logged(one, name)
        assert list(logged(three, name)) == list(range(len(losses)))
    assert set(logged(three, "samples").values()) == {16.0, 10.0}  # two layers, the last batch of five


def test_the_copies_of_ranks_count_once_in_a_checkpoint_from_which_the_run_goes_on(
    pools: Pools, tmp_path: Path
) -> None:
    run = replace(RUN, callbacks=(saving(tmp_path, every_n_train_steps=3),), trainer=RESUMABLE_TRAINER)
    whole = pools.run(3, fit, run)
    joined = joined_weights(whole, 3)
    assert np.array_equal(joined.pop("model.10.weight"), joined["model.0.weight"])
    alone = train(staged(replace(RUN, trainer=RESUMABLE_TRAINER)))
    assert_equal_weights(joined, alone["weights"])
    path = tmp_path / "step=3.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    for state, prefix in ((checkpoint["state_dict"], "model."), (checkpoint["pipeline"]["older_weights"], "")):
        assert len({state[f"{prefix}{unit}.weight"].data_ptr() for unit in (0, 10)}) == 1
        assert f"{prefix}4.bias" in state
    resumed = pools.run(3, fit, replace(run, callbacks=(), ckpt_path=str(path)))
    assert_equal_weights(joined_weights(resumed, 3), joined_weights(whole, 3))
    for name in ("samples", "busiest"):
        assert logged(whole[0], name) == logged(alone, name)
        rest = {step: value for step, value in logged(whole[0], name).items() if step >= 3}
        assert logged(resumed[0], name) == rest
