"""``weight_dtype="bf16"`` through the Trainer: masters, what checkpoints show, and a run that goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.helpers.oracle import assert_equal_weights, joined_weights
from tests.helpers.pool import Pools
from tests.helpers.resumable import RESUMABLE_TRAINER, ResumableNet, saving
from tests.helpers.trainer import Net, Run, Samples, fit

RUN = Run(
    ResumableNet, "async", {"microbatches": 4, "weight_dtype": "bf16"}, optimizer="muon", error_feedback=True,
    samples=37, val_samples=(9,), trainer={**RESUMABLE_TRAINER, "precision": "bf16-mixed"},
)  # fmt: skip


@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_resumed_run_goes_on_and_the_number_of_stages_does_not_matter(
    pools: Pools, stages: int, tmp_path: Path
) -> None:
    run = replace(RUN, callbacks=(saving(tmp_path, every_n_train_steps=3),))
    whole = pools.run(stages, fit, run)
    alone = pools.run(1, fit, replace(RUN, callbacks=()))
    assert_equal_weights(joined_weights(whole, stages), joined_weights(alone, 1))
    for step in (3, 6):
        resumed = pools.run(stages, fit, replace(run, callbacks=(), ckpt_path=str(tmp_path / f"step={step}.ckpt")))
        assert_equal_weights(joined_weights(resumed, stages), joined_weights(whole, stages))


def test_a_checkpoint_shows_the_weights_that_were_validated(pools: Pools, tmp_path: Path) -> None:
    run = replace(RUN, callbacks=(saving(tmp_path, every_n_epochs=1),), trainer={**RUN.trainer, "max_epochs": 1})
    results = pools.run(2, fit, run)
    (path,) = tmp_path.glob("*.ckpt")
    checkpoint = torch.load(path, weights_only=True)
    state, masters = checkpoint["state_dict"], checkpoint["pipeline"]["masters"]
    assert {value.dtype for value in state.values()} == {torch.bfloat16}
    assert {value.dtype for value in masters.values()} == {torch.float32}
    joined = joined_weights(results, 2)  # of the module when the fit is over
    assert all(np.array_equal(state[name].float().numpy(), joined[name]) for name in joined)
    assert not any(np.array_equal(masters[name.removeprefix("model.")].numpy(), joined[name]) for name in joined)
    module = Net(replace(run, trainer={})).eval().to(torch.bfloat16)
    module.load_state_dict(state)
    data = Samples(9, 1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        loss = float(F.mse_loss(module.model(data.x), data.y))
    assert results[0]["callback_metrics"]["val_loss"] == pytest.approx(loss, rel=1e-3)


class NamedAlike(ResumableNet):
    """Has a frozen layer beside ``self.model`` that is called like one of its layers."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.add_module("0", nn.Linear(2, 2).requires_grad_(False))


def state_step(path: Path) -> int:
    return int(torch.load(path, weights_only=True)["global_step"])


def test_what_stands_beside_the_model_keeps_its_own_weights(pools: Pools, tmp_path: Path) -> None:
    callbacks = (saving(tmp_path, every_n_epochs=1),)
    run = replace(RUN, module=NamedAlike, callbacks=callbacks, trainer={**RUN.trainer, "max_epochs": 1})
    pools.run(2, fit, run)
    (path,) = tmp_path.glob("*.ckpt")
    state = torch.load(path, weights_only=True)["state_dict"]
    assert state["0.weight"].shape == (2, 2)
    assert state["0.weight"].dtype == torch.float32
    assert state["model.0.weight"].dtype == torch.bfloat16
    resumed = replace(run, ckpt_path=str(path), callbacks=(), trainer={**run.trainer, "max_epochs": 2})
    for stages in (2, 3):
        assert pools.run(stages, fit, resumed)[0]["global_step"] == 2 * state_step(path)


def test_it_needs_mixed_precision(pools: Pools) -> None:
    run = replace(RUN, trainer={**RUN.trainer, "precision": "32-true"})
    for outcome in pools.outcomes(2, fit, run):
        assert "weight_dtype='bf16' needs precision='bf16-mixed'" in outcome.message


def test_a_checkpoint_of_another_weight_dtype_is_refused(pools: Pools, tmp_path: Path) -> None:
    run = replace(RUN, callbacks=(saving(tmp_path, every_n_train_steps=3),), trainer={**RUN.trainer, "max_epochs": 1})
    pools.run(2, fit, run)
    other = replace(run, options={"microbatches": 4}, callbacks=(), ckpt_path=str(tmp_path / "step=3.ckpt"))
    for outcome in pools.outcomes(2, fit, other):
        assert "written with weight_dtype='bf16', this run has None" in outcome.message
