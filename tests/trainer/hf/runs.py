"""Scenarios for the ranks of a pool: trainings of ``HFModule``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader

from lightning_asyncpp import HFModule
from lightning_asyncpp.optim import ErrorFeedback, MuonAdamW
from lightning_asyncpp.reference import train_reference
from tests.helpers.hf_folders import padded_batches
from tests.helpers.trainer import Run, arrays, make_trainer

SEED, UPDATES = 5, 4


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, betas=(0.8, 0.9))


def muon(parameters: Any) -> torch.optim.Optimizer:
    return MuonAdamW(parameters, lr=0.02, weight_decay=0.05)


def corrected(parameters: Any) -> torch.optim.Optimizer:
    return ErrorFeedback(parameters, base=muon)


OPTIMIZERS = {"adamw": adamw, "muon": muon, "feedback": corrected}


@dataclass(frozen=True)
class Training:
    """A training of the model in a folder.

    Attributes:
        arguments: of the module.
        options: of the strategy.
    """

    folder: str
    strategy: str = "async"
    optimizer: str = "adamw"
    arguments: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=lambda: {"microbatches": 4})
    trainer: dict[str, Any] = field(default_factory=dict)

    def module(self) -> HFModule:
        return HFModule(self.folder, decay="constant", optimizer=OPTIMIZERS[self.optimizer], **self.arguments)


def fit(training: Training, save: str | None = None) -> dict[str, np.ndarray]:
    """Train, and return this rank's weights."""
    L.seed_everything(SEED, verbose=False)
    module = training.module()
    trainer = make_trainer(Run(HFModule, training.strategy, training.options, trainer=training.trainer))  # type: ignore[arg-type]
    trainer.fit(module, DataLoader(padded_batches(UPDATES), batch_size=None))
    if save is not None:
        trainer.save_checkpoint(save)
    return arrays(dict(module.named_parameters()))


def by_oracle(training: Training) -> dict[str, np.ndarray]:
    """The same weights by the definition, in this process."""
    L.seed_everything(SEED, verbose=False)
    module = training.module()
    module.configure_model()
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign, assignment]
    named = [(name, p) for name, p in module.model.named_parameters() if p.requires_grad]  # type: ignore[union-attr]
    base = muon if training.optimizer == "feedback" else OPTIMIZERS[training.optimizer]
    train_reference(
        module.model, lambda batch: module.training_step(batch, 0), [[batch] for batch in padded_batches(UPDATES)],
        base(named), microbatches=4, delay=0 if training.strategy == "sync" else 1,
        error_feedback=1.0 if training.optimizer == "feedback" else None,
        weight=module.microbatch_weight, seed=SEED,
    )  # fmt: skip
    return arrays(dict(module.named_parameters()))
