"""Sections of a run's manifest that a Trainer and its LightningModule have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from torch.utils.data import DistributedSampler

from lightning_asyncpp.data.resumable_data_loader import DealtOut
from lightning_asyncpp.storage.names import local_path
from lightning_asyncpp.strategy_parts.loader_identity import HELD

SHARED = (
    "max_epochs", "min_epochs", "max_steps", "min_steps", "limit_train_batches", "limit_val_batches",
    "limit_test_batches", "limit_predict_batches", "overfit_batches", "fast_dev_run", "val_check_interval",
    "check_val_every_n_epoch", "num_sanity_val_steps", "log_every_n_steps", "accumulate_grad_batches",
    "gradient_clip_val", "gradient_clip_algorithm", "reload_dataloaders_every_n_epochs", "precision",
)  # fmt: skip
"""Arguments of a Trainer that all ranks must share."""
_DEALS_OUT = (DistributedSampler.__name__, DealtOut.__name__)
OWN_HYPER_PARAMETERS = (
    "{}. Every rank trains with its own: right for what a process makes for itself (a name, a folder, a time),"
    " wrong for what decides about the training"
)
"""Of a warning."""


def trainer_section(trainer: L.Trainer) -> dict[str, Any]:
    """The Trainer's arguments, and which callbacks decide together about saving and stopping."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    deciding = [callback.state_key for callback in callbacks if isinstance(callback, (Checkpoint, EarlyStopping))]
    given = {name: getattr(trainer, name) for name in SHARED if hasattr(trainer, name)}  # one is left out for a time
    return {**given, "checkpoint and early-stopping callbacks": deciding}


def known_beside(trainer: L.Trainer, module: LightningModule) -> dict[str, dict[str, Any]]:
    """Sections in which ranks may differ, and which are worth a look where they do in others."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    sections = {"hyper-parameters": hyper_parameters(module)}
    return sections if data is None else {**sections, "hyper-parameters of the data": hyper_parameters(data)}


def checkpoint_folders(trainer: L.Trainer) -> list[Path]:
    """Where its callbacks will write, as far as that is known, on this machine."""
    if trainer.fast_dev_run:  # type: ignore[attr-defined]  # it saves nothing
        return []
    given = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks if _saves(callback)]
    local = [local_path(folder) for folder in given if folder is not None]
    return [folder for folder in local if folder is not None]


def _saves(callback: Checkpoint) -> bool:
    """Whether it is not one that was told to keep nothing."""
    keeps = [getattr(callback, name, True) for name in ("save_top_k", "save_last", "save_on_exception")]
    return any(keeps)


def hyper_parameters(module: LightningModule | L.LightningDataModule) -> dict[str, Any]:
    """What ``save_hyperparameters`` kept."""
    try:
        return dict(module.hparams)
    except Exception:  # of somebody else's class, such as one that looks its values up
        return {}


def data_section(loaders: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What is known of the training data and its order.

    Args:
        loaders: what each of them says of itself.
    """
    return {
        f"loader {number}: {name}" if len(loaders) > 1 else name: value
        for number, loader in enumerate(loaders)
        for name, value in loader.items()
        if value is not None
    }


def comparable(data: Mapping[str, Any], replica: int) -> dict[str, Any]:
    """A data section as ranks compare it: replicas may each have been given data of their own, stages may not.

    What has the same name is the same replica's, or is dealt out to replicas from the same data.

    Args:
        data: of :func:`data_section`.
        replica: of this rank.
    """
    last = {name: name.rpartition(" ")[2] for name in data}
    held = " ".join(str(value) for name, value in data.items() if last[name].rpartition(".")[2] in HELD)
    dealt_out = all(value in _DEALS_OUT for name, value in data.items() if last[name] == "sampler")
    of_data = {f"{name} of {held}": value for name, value in data.items() if held and dealt_out}
    return {**of_data, **{f"{name} in replica {replica}": value for name, value in data.items()}}
