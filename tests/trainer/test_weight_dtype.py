"""With ``weight_dtype="bf16"``, checkpoints contain weights in bf16 and their masters, from which runs resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_asyncpp import ConfigurationError
from tests.helpers.oracle import assert_equal_weights, joined_weights
from tests.helpers.pool import Pools
from tests.helpers.resumable import RESUMABLE_TRAINER, ResumableNet, saving
from tests.helpers.trainer import Net, Run, Samples, fit, staged, train


class NamedAlike(ResumableNet):
    """Module with a frozen layer beside ``self.model`` that has the name of one of the model's layers."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.add_module("0", nn.Linear(2, 2).requires_grad_(False))


RUN = Run(
    NamedAlike, "async", {"microbatches": 4, "weight_dtype": "bf16"}, optimizer="muon", error_feedback=True,
    samples=37, val_samples=(9,), trainer={**RESUMABLE_TRAINER, "precision": "bf16-mixed"},
)  # fmt: skip


def test_a_checkpoint_shows_the_weights_that_were_validated_and_a_run_goes_on(pools: Pools, tmp_path: Path) -> None:
    results = pools.run(2, fit, replace(RUN, callbacks=(saving(tmp_path, every_n_train_steps=5),)))
    whole, again = joined_weights(results, 2), replace(RUN, ckpt_path=str(tmp_path / "step=5.ckpt"))
    resumed = train(staged(again))["weights"]
    assert_equal_weights({name: resumed[name] for name in whole}, whole)

    checkpoint = torch.load(tmp_path / "step=15.ckpt", weights_only=True)
    state, masters = checkpoint["state_dict"], checkpoint["pipeline"]["masters"]
    assert (state.pop("0.weight").dtype, state.pop("0.bias").shape) == (torch.float32, (2,))
    assert {value.dtype for value in state.values()} == {torch.bfloat16}
    assert {value.dtype for value in masters.values()} == {torch.float32}
    assert all(np.array_equal(state[name].float().numpy(), whole[name]) for name in state)
    assert not any(np.array_equal(masters[name.removeprefix("model.")].numpy(), whole[name]) for name in state)
    module = Net(RUN).eval().to(torch.bfloat16)
    module.load_state_dict(state)
    data = Samples(9, 1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        loss = float(F.mse_loss(module.model(data.x), data.y))
    assert results[0]["callback_metrics"]["val_loss"] == pytest.approx(loss, rel=1e-3)
    with pytest.raises(ConfigurationError, match=r"written with weight_dtype='bf16', but this run has None"):
        train(staged(replace(again, options={"microbatches": 4})))
    with pytest.raises(ConfigurationError, match=r"weight_dtype='bf16' needs precision='bf16-mixed'"):
        train(staged(replace(RUN, trainer={**RUN.trainer, "precision": "32-true"})))
