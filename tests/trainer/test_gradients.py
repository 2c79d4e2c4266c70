"""Non-finite gradients stop the run or are skipped, and losses without targets are handled as in a plain run."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_asyncpp.errors import NonFiniteGradientError
from lightning_asyncpp.reference import train_reference
from tests.helpers.oracle import assert_equal_weights
from tests.helpers.trainer import Net, Run, Samples, arrays, staged, train


class PoisonedNet(Net):
    """Module whose training data has a NaN sample in the third batch."""

    def train_dataloader(self) -> Any:
        data = Samples(self.run.samples)
        data.x[20] = float("nan")
        return DataLoader(data, batch_size=self.run.batch_size)


def test_a_batch_whose_gradient_is_not_finite_stops_the_run_or_is_skipped() -> None:
    run = Run(PoisonedNet, trainer={"gradient_clip_val": 0.5})
    with pytest.raises(NonFiniteGradientError, match=r"the gradient of mini-batch 2 holds NaN or Inf"):
        train(staged(run, 2))
    run = replace(run, options={"nonfinite_gradients": "skip"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = train(staged(run, 2))
    module = run.module(run)
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    train_reference(
        module.model, lambda batch: module.training_step(batch, 0), [[batch] for batch in module.train_dataloader()],
        run.make_base(list(module.named_parameters())), microbatches=2,
        max_norm=0.5, skip_nonfinite=True, seed=run.seed,
    )  # fmt: skip
    assert_equal_weights(result["weights"], arrays(dict(module.named_parameters())))
    assert all(np.isfinite(array).all() for array in result["weights"].values())
    assert result["global_step"] == 5
    (warned,) = (str(warning.message) for warning in caught if "NaN" in str(warning.message))
    assert "mini-batch 2: its gradient holds NaN or Inf; the update was skipped" in warned


class LabelledNet(Net):
    """Module whose loss is a mean over valid targets, which some batches lack; its weights stay, since lr is 0."""

    def train_dataloader(self) -> Any:
        data = Samples(36)
        data.y = torch.ones(36, dtype=torch.int64)
        data.y[[*range(12, 24), *range(32, 36)]] = -100
        return DataLoader(data, batch_size=12)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.model(batch["x"]).expand(-1, 2) * torch.tensor([1.0, -1.0])
        loss = F.cross_entropy(logits, batch["y"])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_a_microbatch_without_a_target_is_left_out_of_the_mean() -> None:
    """A microbatch's NaN loss with a finite gradient is left out; the loss of a batch without targets stays NaN."""
    run = Run(LabelledNet, options={"microbatches": 3})
    plain, three = train(replace(run, strategy="plain", options={})), train(staged(run))
    assert three["losses"] == pytest.approx(plain["losses"], rel=1e-6, nan_ok=True)
    assert [math.isnan(loss) for loss in three["losses"]] == [False, True, False]
    assert math.isnan(three["callback_metrics"]["train_loss_epoch"])
