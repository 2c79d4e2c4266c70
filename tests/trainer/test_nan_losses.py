"""A microbatch without a target has a loss of NaN and a finite gradient: it is left out of the batch's mean."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_asyncpp import AsyncPipelineStrategy, DelayedGradientStrategy
from tests.helpers.cases import DIM, make_model
from tests.helpers.pool import Pools
from tests.helpers.trainer import ListLogger

BATCH, BATCHES = 12, 3


class LabelledNet(L.LightningModule):
    """Its loss is a mean over the targets that count; its weights stay, so that every run has the same losses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = make_model(0.0)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, keep = batch
        logits = self.model(x).expand(-1, 2) * torch.tensor([1.0, -1.0])
        loss = F.cross_entropy(logits, torch.where(keep, 0, -100))
        self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=int(keep.sum()) or len(x))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def data(masked: list[int], count: int) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, DIM, generator=generator)
    keep = torch.ones(count, dtype=torch.bool)
    keep[masked] = False
    return DataLoader(TensorDataset(x, keep), batch_size=BATCH)


def fit(strategy: str, options: dict[str, Any], devices: int, masked: list[int], count: int) -> dict[str, Any]:
    made: Any = {
        "plain": lambda: "auto",
        "async": lambda: AsyncPipelineStrategy(**options),
        "delayed": lambda: DelayedGradientStrategy(**options),
    }[strategy]()
    logger = ListLogger()
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, strategy=made, max_epochs=1, logger=logger, log_every_n_steps=1,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(LabelledNet(), data(masked, count))
    return {
        "steps": [
            m["train_loss_step"] for _, m in sorted(logger.records, key=lambda r: r[0]) if "train_loss_step" in m
        ],
        "epoch": float(trainer.callback_metrics["train_loss_epoch"]),
    }


@pytest.mark.parametrize("stages", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_it_is_left_out(pools: Pools, stages: int) -> None:
    masked = [*range(BATCH, BATCH + BATCH // stages), *range(3 * BATCH - BATCH // stages, 3 * BATCH)]
    count = BATCH * BATCHES
    (plain,) = pools.run(1, fit, "plain", {}, 1, masked, count)
    (delayed,) = pools.run(1, fit, "delayed", {"microbatches": stages}, 1, masked, count)
    ranks = pools.run(stages, fit, "async", {"microbatches": stages}, stages, masked, count)
    for result in (delayed, ranks[0]):
        assert result["steps"] == pytest.approx(plain["steps"], rel=1e-6)
    for result in (delayed, *ranks):
        assert result["epoch"] == pytest.approx(plain["epoch"], rel=1e-6)


def test_a_batch_without_any_stays_nan(pools: Pools) -> None:
    ranks = pools.run(2, fit, "async", {"microbatches": 2}, 2, list(range(BATCH, 2 * BATCH)), BATCH * BATCHES)
    assert [math.isnan(loss) for loss in ranks[0]["steps"]] == [False, True, False]
    assert all(math.isnan(result["epoch"]) for result in ranks)
