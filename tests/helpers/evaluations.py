"""Scenarios: trainings with or without evaluations, whose data, model and callbacks draw random numbers."""

from __future__ import annotations

import hashlib
import multiprocessing
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from lightning_asyncpp.fabric import AsyncPipelineStrategy as FabricAsyncPipelineStrategy
from tests.helpers.cases import DIM, Experts, Projection, Routed
from tests.helpers.trainer import Net, Run, Samples, make_trainer, report


@dataclass(frozen=True)
class Evaluations:
    """Plan of the validations during a training, and of how its data is read."""

    trainer: dict[str, Any] = field(default_factory=dict)  # arguments of the Trainer
    sizes: tuple[tuple[int, int], ...] = ((13, 4),)  # number of samples and batch size of each validation loader
    shuffled: bool = False  # loaders shuffle by torch's generator, without the distributed sampler
    drawing: bool = True  # training samples get random noise when they are read
    workers: int = 0  # number of processes that read the training set
    gradients: bool = False  # the validation runs with gradients enabled
    drawn_before: bool = False  # the process draws from its generators after it has been seeded


class TorchNoisySamples(Samples):
    """Dataset whose samples get noise from torch's generator, which validation steps leave unchanged."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        return {**sample, "x": sample["x"] + 0.1 * torch.randn(DIM)}


class NoisySamples(TorchNoisySamples):
    """Dataset whose samples also get noise from NumPy's and Python's generators."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        return {**sample, "x": sample["x"] + 0.1 * np.random.rand() + 0.1 * random.random()}


class RestlessNet(Net):
    """Module with running statistics, dropout, layers that count, and random numbers before and after the model."""

    def __init__(self, run: Run, gradients: bool = False) -> None:
        super().__init__(run)
        torch.manual_seed(4)
        self.gradients = gradients
        self.batches: list[str] = []
        self.model = nn.Sequential(
            nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.Dropout(0.2), Routed(), Projection(), Experts(0.2), Routed(),
            nn.BatchNorm1d(DIM), nn.Linear(DIM, 1),
        )  # fmt: skip

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        self.batches.append(fingerprint(batch["x"]))
        out = self.model(batch["x"] + 0.1 * torch.randn_like(batch["x"]))
        return F.mse_loss(out * (1 + 0.1 * torch.rand(())), batch["y"])

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        with torch.set_grad_enabled(self.gradients):
            out = self.model(batch["x"] + torch.randn_like(batch["x"]))
        self.log("val_loss", F.mse_loss(out * torch.rand(()), batch["y"]) + np.random.rand() + random.random())


class DrawsInValidation(L.Callback):
    """Callback that draws from every generator in the hooks of a validation."""

    def on_validation_start(self, *args: Any) -> None:
        draw()

    on_validation_batch_start = on_validation_epoch_end = on_validation_end = on_validation_start


def training_loader(run: Run, plan: Evaluations) -> DataLoader:
    """Return the training loader, with forked workers: others would import everything anew in a pool's process."""
    data = NoisySamples(run.samples) if plan.drawing else Samples(run.samples)
    forked = "fork" if plan.workers else None
    return DataLoader(data, run.batch_size, run.shuffle, num_workers=plan.workers, multiprocessing_context=forked)


@contextmanager
def may_have_children() -> Iterator[None]:
    """Allow data workers in a pool's process, a daemon, which multiprocessing forbids to have children."""
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    before, config["daemon"] = config.get("daemon"), False
    try:
        yield
    finally:
        config["daemon"] = before


def draw() -> tuple[float, float, float]:
    """Return a random number from each of the process's generators."""
    return float(torch.rand(())), float(np.random.rand()), random.random()


def fingerprint(x: Tensor) -> str:
    """Return a short hash of a tensor."""
    return hashlib.blake2b(x.detach().contiguous().numpy().tobytes(), digest_size=8).hexdigest()


def trajectory(run: Run, evaluations: Evaluations | None, plan: Evaluations) -> dict[str, Any]:
    """Train with or without evaluations, and return a report; ``plan`` says how the training data is read."""
    L.seed_everything(run.seed, verbose=False, workers=True)
    if plan.drawn_before:
        draw()
    module = RestlessNet(run, evaluations is not None and evaluations.gradients)
    more: dict[str, Any] = {"use_distributed_sampler": not plan.shuffled, "limit_val_batches": 0, "logger": "list"}
    loaders = None
    if evaluations is not None:
        more |= {"limit_val_batches": 1.0, **evaluations.trainer, "callbacks": [DrawsInValidation()]}
        loaders = [
            DataLoader(TorchNoisySamples(count, seed), batch_size=size, shuffle=plan.shuffled)
            for seed, (count, size) in enumerate(evaluations.sizes, 1)
        ]
    trainer = make_trainer(run, **more)
    with may_have_children():
        trainer.fit(module, training_loader(run, plan), loaders, ckpt_path=run.ckpt_path, weights_only=True)
    left_over, found = draw(), report(trainer, module)
    return found | {
        "losses": [(step, m["train_loss_step"]) for step, m in found["records"] if "train_loss_step" in m],
        "epochs": [m["train_loss_epoch"] for _, m in found["records"] if "train_loss_epoch" in m],
        "counted": sorted((step, m["busiest"]) for step, m in found["records"] if "busiest" in m),
        "batches": module.batches,
        "left_over": left_over,
        "validations": [m for _, m in found["records"] if "val_loss" in " ".join(m)],
    }


def fabric_batches(run: Run, plan: Evaluations) -> list[str]:
    """Return fingerprints of the batches that this rank's loader returns in two epochs of a Fabric loop."""
    L.seed_everything(run.seed, verbose=False, workers=True)
    world = dist.get_world_size()
    fabric = L.Fabric(strategy=FabricAsyncPipelineStrategy(**run.options), devices=world, accelerator="cpu")
    fabric.launch()
    if plan.drawn_before:
        draw()
    loader = training_loader(run, plan)
    loader = fabric.setup_dataloaders(loader, use_distributed_sampler=not plan.shuffled)
    batches = []
    for epoch in range(2):
        if isinstance(sampler := getattr(loader, "sampler", None), DistributedSampler):
            sampler.set_epoch(epoch)
        with may_have_children():
            batches += [fingerprint(batch["x"]) for batch in loader if isinstance(batch, dict)]
    return batches


def trainer_batches(run: Run, plan: Evaluations) -> list[str]:
    """Return fingerprints of the batches that a Trainer reads."""
    L.seed_everything(run.seed, verbose=False, workers=True)
    seen: list[str] = []

    class Sees(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            if isinstance(batch, dict):
                seen.append(fingerprint(batch["x"]))

    loader = training_loader(run, plan)
    trainer = make_trainer(run, callbacks=[Sees()], use_distributed_sampler=not plan.shuffled)
    with may_have_children():
        trainer.fit(Net(run), loader)
    return seen
