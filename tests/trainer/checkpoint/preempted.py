"""Scenarios: a run on the ranks of a pool in which some of them receive a signal at a certain moment."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from torch import Tensor
from torch.nn import functional as F
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import MeanSquaredError

from tests.helpers.trainer import Net, Run, Samples, evaluate, fit


class Resumable(Net):
    """Its shuffled loader keeps its place; its validation draws random numbers, and has a torchmetrics object."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.val_mse = MeanSquaredError()

    def train_dataloader(self) -> Any:
        return StatefulDataLoader(Samples(self.run.samples), batch_size=self.run.batch_size, shuffle=True)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        output = self.model(batch["x"])
        self.log("val_loss", (1 + 0.1 * torch.rand(())) * F.mse_loss(output, batch["y"]), prog_bar=True)
        if dataloader_idx == 0:
            self.val_mse(output, batch["y"])
            self.log("val_mse", self.val_mse)


@dataclass
class Signals(L.Callback):
    """Sends a signal to its own process, once.

    Attributes:
        ranks: on which.
        hook: in which; ``"on_sanity"``: in a batch of the sanity check.
        index: of the call, counted over the run from 0.
        number: of the signal.
    """

    ranks: tuple[int, ...]
    hook: str
    index: int = 0
    number: int = signal.SIGTERM
    calls: int = 0

    def __post_init__(self) -> None:
        hook = "on_validation_batch_end" if self.hook == "on_sanity" else self.hook
        setattr(self, hook, self._called)

    def _called(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if trainer.sanity_checking != (self.hook == "on_sanity"):
            return
        if self.calls == self.index and trainer.global_rank in self.ranks:
            os.kill(os.getpid(), self.number)
            os.kill(os.getpid(), self.number)  # the second one changes nothing
        self.calls += 1


class Records(L.Callback):
    """What was seen, kept although the run ends with an exception."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.validations = 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.steps.append(trainer.global_step)

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.validations += not trainer.sanity_checking


def under_slurm(run: Run, folder: str) -> dict[str, Any]:
    """:func:`preempted` as a task of a SLURM job, whose ``scontrol`` lies in a folder."""
    rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
    before = dict(os.environ)
    os.environ.update(
        SLURM_NTASKS=world, SLURM_NTASKS_PER_NODE=world, SLURM_PROCID=rank, SLURM_LOCALID=rank, SLURM_NODEID="0",
        SLURM_JOB_ID="4711", SLURM_JOB_NAME="train", PATH=f"{folder}:{os.environ['PATH']}",
    )  # fmt: skip
    try:
        return preempted(replace(run, trainer={**run.trainer, "plugins": SLURMEnvironment()}))
    finally:
        os.environ.clear()
        os.environ.update(before)


def preempted(run: Run, what: str = "fit") -> dict[str, Any]:
    """Run, and report with which exit code it ended and what was seen until then."""
    records = Records()
    run = replace(run, callbacks=(*run.callbacks, (lambda: records, {})))
    result: dict[str, Any] = {}
    code: Any = 0
    try:
        result = fit(run) if what == "fit" else evaluate(run, what)
    except SystemExit as end:
        code = end.code
    return {**result, "code": code, "steps": records.steps, "validations": records.validations}
