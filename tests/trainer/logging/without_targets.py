"""Trainings of replicas of which some batches hold no targets; weights stay, so that all runs see the same."""

from __future__ import annotations

import os
import warnings
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_asyncpp import AsyncPipelineStrategy, SyncPipelineStrategy
from tests.helpers.cases import DIM, make_model
from tests.helpers.trainer import ListLogger

BATCH, BATCHES, REPLICAS = 8, 4, 2  # samples of a batch of all replicas together
SAMPLES = BATCH * BATCHES


class Counting(L.LightningModule):
    """Its values are means, sums and extremes over the targets that count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = make_model(0.0)
        self.mean = MeanMetric()
        self.val_mean = MeanMetric()

    def microbatch_weight(self, batch: list[Tensor]) -> float:
        return float(batch[1].sum())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        losses, keep = self._losses(batch)
        kept, count = losses[keep], int(keep.sum())
        loss, size = self._mean(losses, keep), self._size(keep)
        if size is not None:
            self.log("loss", loss, on_step=True, on_epoch=True, **size)
            self.log_dict({"a": loss + 1, "b": loss * 2}, on_step=False, on_epoch=True, **size)
        self.log("count", float(count), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("highest", kept.max() if count else torch.tensor(float("-inf")), reduce_fx="max")
        self.log("lowest", kept.min() if count else torch.tensor(float("inf")), reduce_fx="min")
        if count and batch_idx % 2 and size is not None:
            self.log("now_and_then", loss, on_step=True, on_epoch=True, **size)
        if count:
            self.mean.update(loss.detach(), weight=count)
        self.log("metric", self.mean, on_step=False, on_epoch=True)
        return {"loss": loss}

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        losses, keep = self._losses(batch)
        loss, count = self._mean(losses, keep), int(keep.sum())
        if (size := self._size(keep)) is not None:
            self.log("val_loss", loss, **size)
        self.log("val_count", float(count), reduce_fx="sum")
        if count:
            self.val_mean.update(loss, weight=count)
        self.log("val_metric", self.val_mean)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def _size(self, keep: Tensor) -> dict[str, int] | None:
        """What a single process says of its means; None: nothing, where no microbatch would have a weight."""
        if hasattr(self.trainer.strategy, "applies_statistics"):
            return {}
        count = int(keep.sum())
        return {"batch_size": count} if count else None

    def _losses(self, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        x, keep = batch
        logits = self.model(x).expand(-1, 2) * torch.tensor([1.0, -1.0])
        return F.cross_entropy(logits, torch.where(keep, 0, -100), reduction="none"), keep

    def _mean(self, losses: Tensor, keep: Tensor) -> Tensor:
        """Of the targets that count: 0 without any."""
        return losses.sum() / keep.sum().clamp_min(1)


def data(masked: list[int], replica: int | None) -> DataLoader:
    """Every replica has every second sample; batch t of all replicas together is batch t of one process."""
    x = torch.randn(SAMPLES, DIM, generator=torch.Generator().manual_seed(1))
    keep = torch.ones(SAMPLES, dtype=torch.bool)
    keep[masked] = False
    share = slice(None) if replica is None else slice(replica, None, REPLICAS)
    return DataLoader(TensorDataset(x[share], keep[share]), batch_size=BATCH if replica is None else BATCH // REPLICAS)


def of_replica(batch: int, replica: int) -> list[int]:
    """The samples of a batch that a replica has."""
    return list(range(batch * BATCH + replica, (batch + 1) * BATCH, REPLICAS))


def fit(strategy: str, masked: list[int], accumulate: int = 1) -> dict[str, Any]:
    options: dict[str, Any] = {"data_parallel_size": REPLICAS, "microbatches": 2}
    made: Any = {
        "plain": lambda: "auto",
        "async": lambda: AsyncPipelineStrategy(**options),
        "sync": lambda: SyncPipelineStrategy(**options),
    }[strategy]()
    processes = 1 if strategy == "plain" else int(os.environ["WORLD_SIZE"])
    replica = None if strategy == "plain" else int(os.environ["RANK"]) // (processes // REPLICAS)
    logger = ListLogger()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = L.Trainer(
            accelerator="cpu", devices=processes, strategy=made, max_epochs=2, logger=logger, log_every_n_steps=1,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
            use_distributed_sampler=False, num_sanity_val_steps=0, accumulate_grad_batches=accumulate,
        )  # fmt: skip
        trainer.fit(Counting(), data(masked, replica), data(masked, replica))
    return {
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "records": [(step, sorted(m.items())) for step, m in logger.records],
        "steps": trainer.global_step,
        "told": [str(w.message) for w in caught],
    }
