"""Replicas without targets, or without a logged value, do not affect means, which equal those of one process."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from tests.helpers.cases import DIM
from tests.helpers.pool import Pools
from tests.helpers.trainer import Net, Run, fit

BATCH, BATCHES, REPLICAS = 8, 4, 2  # BATCH: samples of a batch over all replicas


class Counting(Net):
    """Model that logs means and sums over unmasked targets; its weights never change, so all runs log the same."""

    def __init__(self, run: Run, masked: Sequence[int]) -> None:
        super().__init__(run)
        self.masked, self.mean, self.val_mean = masked, MeanMetric(), MeanMetric()

    def train_dataloader(self) -> Any:
        """Return a loader of this replica's samples: with two replicas, every second one."""
        x = torch.randn(BATCH * BATCHES, DIM, generator=torch.Generator().manual_seed(1))
        keep = torch.ones(len(x), dtype=torch.bool)
        keep[self.masked] = False
        of = getattr(self.trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
        replicas = of["num_replicas"]
        return DataLoader(TensorDataset(*(t[of["rank"] :: replicas] for t in (x, keep))), batch_size=BATCH // replicas)

    val_dataloader = train_dataloader

    def microbatch_weight(self, batch: list[Tensor]) -> float:
        return float(batch[1].sum())

    def _step(self, batch: list[Tensor], mean: MeanMetric, name: str) -> Tensor:
        x, keep = batch
        logits = self.model(x).expand(-1, 2) * torch.tensor([1.0, -1.0])
        losses, count = F.cross_entropy(logits, torch.where(keep, 0, -100), reduction="none"), int(keep.sum())
        loss = losses.sum() / max(count, 1)
        if self.run.strategy != "plain":
            self.log(f"{name}loss", loss, on_epoch=True)
        elif count:  # in plain Lightning, the weight of the mean is given by hand
            self.log(f"{name}loss", loss, on_epoch=True, batch_size=count)
        self.log(f"{name}count", float(count), reduce_fx="sum", on_step=False, on_epoch=True)
        if count:
            self.log(f"{name}sometimes", loss, on_step=False, on_epoch=True, batch_size=count)
            mean.update(loss.detach(), weight=count)
        self.log(f"{name}metric", mean, on_step=False, on_epoch=True)
        return loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        return self._step(batch, self.mean, "")

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        self._step(batch, self.val_mean, "val_")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def of_replica(batch: int, replica: int) -> list[int]:
    """Return the samples of a batch that a replica has."""
    return list(range(batch * BATCH + replica, (batch + 1) * BATCH, REPLICAS))


def logged(run: Run) -> dict[str, float]:
    """Train, and return the metrics except ``loss_step``; fail if a warning recommends ``sync_dist``."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*sync_dist.*")
        metrics: dict[str, float] = fit(run)["callback_metrics"]
    return {name: value for name, value in metrics.items() if name != "loss_step"}


@pytest.mark.parametrize(
    ("strategy", "masked", "accumulate"),
    [
        pytest.param("async", [*of_replica(0, 0), *range(8, 20)], 1, id="of one, of all, a microbatch"),
        pytest.param("sync", [n for batch in range(BATCHES) for n in of_replica(batch, 1)], 1, id="all of one"),
        pytest.param("async", [*of_replica(0, 0), *of_replica(3, 1)], 2, id="one of accumulated ones"),
    ],
)
def test_epochs_are_logged_as_those_of_a_single_process(
    pools: Pools, strategy: str, masked: list[int], accumulate: int
) -> None:
    module = partial(Counting, masked=masked)
    plain = logged(Run(module, "plain", trainer={"max_epochs": 2}))
    names = plain.keys() - {"loss", "val_loss_step"}
    assert {"loss_epoch", "count", "metric", "sometimes", "val_count"} <= names
    options = {"data_parallel_size": REPLICAS, "microbatches": 2}
    run = Run(module, strategy, options, {"max_epochs": 2, "accumulate_grad_batches": accumulate})
    first, *others = pools.run(2 * REPLICAS, logged, run)
    assert {name: first[name] for name in names} == pytest.approx({name: plain[name] for name in names}, rel=1e-5)
    for other in others:
        assert other == pytest.approx(first, rel=0, abs=0, nan_ok=True)
