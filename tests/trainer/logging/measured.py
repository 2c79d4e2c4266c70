"""Scenarios: evaluations with torchmetrics objects, and evaluations of checkpoints that others wrote."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from tests.helpers.cases import DIM
from tests.helpers.trainer import Net, Run, Samples, loader, make_trainer, plain_metrics

CLASSES = 3


class ClassifierNet(Net):
    """Measures its validations with torchmetrics objects: some are logged, some computed where the epoch ends."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        torch.manual_seed(4)
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


def val_loader(run: Run) -> DataLoader:
    return DataLoader(Samples(run.val_samples[0], 1), batch_size=run.batch_size)


def fit_measured(run: Run, folder: str) -> dict[str, Any]:
    """Train with callbacks that decide on what torchmetrics objects say; what they decided, on this rank."""
    L.seed_everything(run.seed, verbose=False)
    best = ModelCheckpoint(folder, monitor="val_accuracy", mode="max", save_top_k=2, filename="{step}")
    patient = EarlyStopping("mean_loss", patience=0, min_delta=0.5)
    trainer = make_trainer(run, callbacks=[best, patient], enable_checkpointing=True)
    trainer.fit(run.module(run), loader(run, shuffle=run.shuffle), val_loader(run))
    return {
        "metrics": plain_metrics(trainer), "step": trainer.global_step, "best": best.best_model_path,
        "kept": sorted(best.best_k_models), "stopped": patient.stopped_epoch, "best_score": float(patient.best_score),
    }  # fmt: skip


def fit_and_save(run: Run, path: str) -> None:
    """Train, and save at the end."""
    L.seed_everything(run.seed, verbose=False)
    trainer = make_trainer(run)
    trainer.fit(run.module(run), loader(run, shuffle=run.shuffle))
    trainer.save_checkpoint(path)


def evaluate_checkpoint(run: Run, path: str) -> dict[str, Any]:
    """``validate`` and ``predict`` of a checkpoint, by a module with other weights."""
    L.seed_everything(run.seed + 1, verbose=False)
    module, trainer = run.module(run), make_trainer(run)
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, 3.0)
    metrics = trainer.validate(module, val_loader(run), ckpt_path=path, weights_only=True, verbose=False)
    predicted = trainer.predict(module, val_loader(run), ckpt_path=path, weights_only=True)
    # Replicas have a part each, and stages before the last one nothing.
    return {"metrics": metrics[0], "predicted": [batch.numpy() for batch in predicted or [] if batch is not None]}
