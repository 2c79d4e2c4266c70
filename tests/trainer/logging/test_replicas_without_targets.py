"""A replica whose batch holds no targets says nothing about means: those of the others are a single process's."""

from __future__ import annotations

import os
import warnings
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_asyncpp import AsyncPipelineStrategy, SyncPipelineStrategy
from tests.helpers.cases import DIM, make_model
from tests.helpers.pool import Pools

BATCH, BATCHES, REPLICAS = 8, 4, 2  # samples of a batch of all replicas together
STRATEGIES: dict[str, Any] = {"async": AsyncPipelineStrategy, "sync": SyncPipelineStrategy}


class Counting(L.LightningModule):
    """Its values are means and sums over the targets that count; its weights stay, so that all runs see the same."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = make_model(0.0)
        self.mean, self.val_mean = MeanMetric(), MeanMetric()

    def microbatch_weight(self, batch: list[Tensor]) -> float:
        return float(batch[1].sum())

    def _step(self, batch: list[Tensor], mean: MeanMetric, name: str) -> Tensor:
        x, keep = batch
        logits = self.model(x).expand(-1, 2) * torch.tensor([1.0, -1.0])
        losses, count = F.cross_entropy(logits, torch.where(keep, 0, -100), reduction="none"), int(keep.sum())
        loss = losses.sum() / max(count, 1)
        if hasattr(self.trainer.strategy, "applies_statistics"):
            self.log(f"{name}loss", loss, on_epoch=True)
        elif count:  # what a single process says of its means
            self.log(f"{name}loss", loss, on_epoch=True, batch_size=count)
        self.log(f"{name}count", float(count), reduce_fx="sum", on_step=False, on_epoch=True)
        if count:
            mean.update(loss.detach(), weight=count)
        self.log(f"{name}metric", mean, on_step=False, on_epoch=True)
        return loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self._step(batch, self.mean, "")

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._step(batch, self.val_mean, "val_")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def of_replica(batch: int, replica: int) -> list[int]:
    """The samples of a batch that a replica has: every second one of the batch of one process."""
    return list(range(batch * BATCH + replica, (batch + 1) * BATCH, REPLICAS))


def fit(strategy: str, masked: list[int], accumulate: int = 1) -> tuple[dict[str, float], list[str]]:
    """Train; what was logged of epochs, and what was warned of."""
    replicas = 1 if strategy == "plain" else REPLICAS
    processes = 1 if strategy == "plain" else int(os.environ["WORLD_SIZE"])
    replica = int(os.environ["RANK"]) // (processes // REPLICAS) if replicas > 1 else 0
    x = torch.randn(BATCH * BATCHES, DIM, generator=torch.Generator().manual_seed(1))
    keep = torch.ones(len(x), dtype=torch.bool)
    keep[masked] = False
    data = DataLoader(TensorDataset(x[replica::replicas], keep[replica::replicas]), batch_size=BATCH // replicas)
    made: Any = "auto"
    if strategy != "plain":
        made = STRATEGIES[strategy](data_parallel_size=REPLICAS, microbatches=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = L.Trainer(
            accelerator="cpu", devices=processes, strategy=made, max_epochs=2, logger=False, log_every_n_steps=1,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
            use_distributed_sampler=False, num_sanity_val_steps=0, accumulate_grad_batches=accumulate,
        )  # fmt: skip
        trainer.fit(Counting(), data, data)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items() if name != "loss_step"}
    return logged, [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("strategy", "masked", "accumulate"),
    [
        pytest.param("async", of_replica(0, 0), 1, id="the first batch of one"),
        pytest.param("async", [*of_replica(1, 0), *of_replica(1, 1)], 1, id="a batch of all"),
        pytest.param("sync", [n for batch in range(BATCHES) for n in of_replica(batch, 1)], 1, id="all of one"),
        pytest.param("async", [*of_replica(0, 0), *of_replica(3, 1)], 2, id="one of accumulated ones"),
    ],
)
def test_epochs_are_logged_as_those_of_a_single_process(
    pools: Pools, strategy: str, masked: list[int], accumulate: int
) -> None:
    plain, _ = fit("plain", masked)
    assert {"loss", "count", "metric", "val_count"} <= plain.keys()
    names = [name for name in plain if name not in ("loss", "val_loss_step")]
    first, *others = pools.run(2 * REPLICAS, fit, strategy, masked, accumulate)
    assert {name: first[0][name] for name in names} == pytest.approx({n: plain[n] for n in names}, rel=1e-5)
    for logged, told in (first, *others):
        assert logged == pytest.approx(first[0], rel=0, abs=0, nan_ok=True)
        assert not [text for text in told if "sync_dist" in text]
