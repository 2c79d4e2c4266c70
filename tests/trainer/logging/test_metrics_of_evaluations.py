"""Metrics of evaluations are the same on all ranks as in a single process, also for a checkpoint of another run."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from tests.helpers.cases import DIM
from tests.helpers.pool import Pools
from tests.helpers.resumable import ONE_PROCESS, saving
from tests.helpers.trainer import Net, Run, evaluate, fit, make_trainer, val_loaders

CLASSES = 3


class ClassifierNet(Net):
    """Model with torchmetrics objects in its validation: one is logged, the others are computed at the epoch's end."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        layers = [nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, CLASSES)]
        self.model = nn.Sequential(*layers)
        self.mean = MeanMetric()
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        scores = {"accuracy": MulticlassAccuracy(CLASSES), "f1": MulticlassF1Score(CLASSES)}
        self.scores = MetricCollection(scores, prefix="val_")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return F.cross_entropy(self.model(batch["x"]), (batch["x"][:, :2] > 0).sum(1))

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        logits, target = self.model(batch["x"]), (batch["x"][:, :2] > 0).sum(1)
        losses = F.cross_entropy(logits, target, reduction="none")
        self.mean.update(losses)
        self.accuracy.update(logits, target)
        self.scores.update(logits, target)
        self.log("val_loss", losses.mean())
        self.log("logged_accuracy", self.accuracy)

    def on_validation_epoch_end(self) -> None:
        self.log("mean_loss", self.mean.compute())
        self.log_dict(self.scores.compute())
        self.mean.reset()
        self.scores.reset()


RUN = Run(
    ClassifierNet, "sync", {"microbatches": 2}, {"enable_checkpointing": True, "max_epochs": 3},
    samples=48, batch_size=12, val_samples=(36,),
)  # fmt: skip
REPLICAS = replace(RUN, options={"microbatches": 3, "data_parallel_size": 2}, batch_size=6, shuffle=True)


def test_callbacks_decide_alike_on_what_torchmetrics_objects_say(pools: Pools, tmp_path: Path) -> None:
    best = saving(tmp_path, monitor="val_accuracy", mode="max", save_top_k=2)
    patient = (EarlyStopping, {"monitor": "mean_loss", "patience": 0, "min_delta": 0.5})
    first, *others = pools.run(4, fit, replace(REPLICAS, strategy="default", callbacks=(best, patient)))
    names = {"mean_loss", "val_accuracy", "val_f1", "logged_accuracy", "val_loss"}
    assert names <= first["callback_metrics"].keys()
    for rank in others:
        assert {rank["best"]} == {first["best"]} != {""}
        assert rank["callback_metrics"] == first["callback_metrics"]
        assert rank["global_step"] == first["global_step"]
    assert first["global_step"] == 8, "the second epoch is not half a unit better: training ends there, on every rank"
    assert first["callback_metrics"]["mean_loss"] == pytest.approx(first["callback_metrics"]["val_loss"], rel=1e-6)


def evaluate_checkpoint(run: Run, path: str) -> dict[str, Any]:
    """Validate and predict with a checkpoint, loaded into a module with other weights."""
    L.seed_everything(run.seed + 1, verbose=False)
    module, trainer = run.module(run), make_trainer(run, enable_checkpointing=False)
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, 3.0)
    metrics = trainer.validate(module, val_loaders(run), ckpt_path=path, weights_only=True, verbose=False)
    predicted = trainer.predict(module, val_loaders(run), ckpt_path=path, weights_only=True)
    # Each replica has a part of the predictions, and stages before the last one have none.
    return {"metrics": metrics[0], "predicted": [batch.numpy() for batch in predicted or [] if batch is not None]}


def test_a_checkpoint_has_the_same_metrics_wherever_it_is_evaluated(pools: Pools, tmp_path: Path) -> None:
    """Metrics are bitwise equal for the same microbatches; whole batches and sums over replicas round differently."""
    path = str(tmp_path / "written.ckpt")
    written = (saving(tmp_path, filename="written", save_top_k=1),)
    pools.run(2, fit, replace(RUN, trainer={**RUN.trainer, "max_epochs": 1}, callbacks=written))
    (expected,) = ONE_PROCESS.run(1, evaluate_checkpoint, RUN, path)
    wanted = np.concatenate(expected["predicted"])
    assert len(wanted) == 36
    for ranks in (ONE_PROCESS.run(3, evaluate_checkpoint, RUN, path), pools.run(2, evaluate_checkpoint, RUN, path)):
        np.testing.assert_array_equal(np.concatenate(ranks[0]["predicted"]), wanted)
        assert all(rank["metrics"] == expected["metrics"] for rank in ranks)
    replicas = pools.run(4, evaluate_checkpoint, REPLICAS, path)
    plain = evaluate_checkpoint(replace(RUN, strategy="plain"), path)
    for ranks, in_order in ((replicas, partial(np.sort, axis=0)), ([plain], np.asarray)):
        found = np.concatenate([part for rank in ranks for part in rank["predicted"]])  # samples alternate by replica
        np.testing.assert_allclose(in_order(found), in_order(wanted), rtol=0, atol=1e-6)
        assert all(rank["metrics"] == ranks[0]["metrics"] for rank in ranks)
        assert ranks[0]["metrics"] == pytest.approx(expected["metrics"], rel=1e-6)


COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "barrier", "broadcast",
    "broadcast_object_list", "gather", "gather_object", "reduce", "scatter",
)  # fmt: skip


def numbers_of_collectives(what: str, samples: int) -> list[int]:
    """Return the number of blocking calls of each collective, including those by Lightning and torchmetrics."""
    run = Run(Net, val_samples=(samples,))
    with ExitStack() as stack:
        spies = [stack.enter_context(patch.object(dist, name, wraps=getattr(dist, name))) for name in COLLECTIVES]
        fit(run) if what == "fit" else evaluate(run, what)
    return [sum(not call.kwargs.get("async_op") for call in spy.call_args_list) for spy in spies]


@pytest.mark.parametrize("what", ["validate", "fit"])
def test_collectives_of_an_evaluation_do_not_grow_with_its_batches(pools: Pools, what: str) -> None:
    few, many = (pools.run(2, numbers_of_collectives, what, 8 * batches) for batches in (2, 12))
    assert few == many
    assert all(sum(numbers) > 0 for numbers in few)
