"""Sections of a run's manifest that a Trainer and its LightningModule have."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping

from lightning_asyncpp.pipeline.optimizers.described import schedule
from lightning_asyncpp.storage.names import local_path
from lightning_asyncpp.strategy_parts.loader_identity import HELD

SHARED = (
    "max_epochs", "min_epochs", "max_steps", "min_steps", "limit_train_batches", "limit_val_batches",
    "limit_test_batches", "limit_predict_batches", "overfit_batches", "fast_dev_run", "val_check_interval",
    "check_val_every_n_epoch", "num_sanity_val_steps", "log_every_n_steps", "accumulate_grad_batches",
    "gradient_clip_val", "gradient_clip_algorithm", "reload_dataloaders_every_n_epochs", "precision",
)  # fmt: skip
"""Arguments of a Trainer that all ranks must share."""
_OF_A_PROCESS = re.compile(r"rank|device|host|node|port|gpu|cuda|process_(index|id)|uuid|(^|_)pid$|is_(main|master)")
_PLACE = re.compile(r"(^|_)(path|dir|directory|folder|file|filename)s?$", re.IGNORECASE)
_NAME_OF_A_RUN = re.compile(r"^name$|(^|_)(run|exp|experiment|trial|job|wandb)_?(name|id)?$|(^|_)id$", re.IGNORECASE)
_TIME = re.compile(r"(^|_)(time|timestamp|date|datetime|now|start|started|created|at)(_|$)", re.IGNORECASE)
_STAMPED = re.compile(  # with a date, a time, or a random number in hexadecimal digits
    r"\d{4}[-_./]\d\d[-_./]\d\d|\d\d[-_.:h]\d\d[-_.:m]\d\d|(?<![0-9A-Za-z])(?=[a-f]*\d)[0-9a-f]{6,}(?![0-9A-Za-z])"
)
_FIRST_TIME = 1e9  # seconds, in 2001; a number under that name that is as large tells a time
_LEVELS = 20  # of values in each other, which may also hold themselves


def trainer_section(trainer: L.Trainer) -> dict[str, Any]:
    """The Trainer's arguments, and which callbacks decide together about saving and stopping."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    deciding = [callback.state_key for callback in callbacks if isinstance(callback, (Checkpoint, EarlyStopping))]
    given = {name: getattr(trainer, name) for name in SHARED if hasattr(trainer, name)}  # one is left out for a time
    return {**given, "checkpoint and early-stopping callbacks": deciding}


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


def hyper_parameters(module: LightningModule) -> dict[str, Any]:
    """What ``save_hyperparameters`` kept, but what may be a process's own: every rank runs the script by itself.

    That are names of ranks and devices, paths, names of runs, and times and random numbers that go into those.
    """
    return dict(_flat(module.hparams, _LEVELS))


def schedulers_section(trainer: L.Trainer) -> dict[str, Any]:
    """What schedulers were told, and when they step."""
    configs = trainer.lr_scheduler_configs
    steps = [[config.interval, config.frequency, config.monitor] for config in configs]
    told = schedule([config.scheduler for config in configs])
    return {**told, "interval, frequency and monitor": steps} if steps else {}


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
    dealt_out = all(value == "DistributedSampler" for name, value in data.items() if last[name] == "sampler")
    of_data = {f"{name} of {held}": value for name, value in data.items() if held and dealt_out}
    return {**of_data, **{f"{name} in replica {replica}": value for name, value in data.items()}}


def _flat(values: Mapping[str, Any], levels: int, prefix: str = "") -> Iterator[tuple[str, Any]]:
    try:
        pairs = [(str(name), value) for name, value in values.items()]
    except Exception:  # of somebody else's class, such as one that looks its values up
        return
    for name, value in pairs:
        if isinstance(value, Mapping):
            if levels:
                yield from _flat(value, levels - 1, f"{prefix}{name}.")
        elif isinstance(value, (list, tuple)):
            yield f"{prefix}{name}", [kept for child in value for kept in _shared(name, child, levels)]
        else:
            yield from ((f"{prefix}{name}", kept) for kept in _shared(name, value, levels))


def _shared(name: str, value: Any, levels: int) -> Iterator[Any]:
    """What of a value all ranks have in common: it, or nothing."""
    if isinstance(value, Mapping):
        yield dict(_flat(value, levels - 1)) if levels else {}
    elif not (_OF_A_PROCESS.search(name) or _is_of_a_process(name, value)):
        yield value


def _is_of_a_process(name: str, value: Any) -> bool:
    if isinstance(value, str):
        return os.sep in value or any(
            pattern.search(text) for pattern, text in ((_PLACE, name), (_NAME_OF_A_RUN, name), (_STAMPED, value))
        )
    return isinstance(value, (int, float)) and value >= _FIRST_TIME and _TIME.search(name) is not None
