"""The callback that watches a training of an ablation: its curves, its time, and whether it diverged."""

from __future__ import annotations

import contextlib
import math
import pkgutil
import time
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_asyncpp.errors import ConfigurationError

PROGRESS = "progress"
_READ_EVERY = 20
_WRITE_EVERY_SECONDS = 1.0


class DivergedError(RuntimeError):
    """A loss is not finite, or above the bound."""


class Recorder(Callback):
    """Records validations and training losses, and ends a training that diverged.

    Args:
        folder: gets the file ``progress``, "step of steps", from the moment on when the data is prepared.
        metric: name of the validation loss as the module logs it.
        diverged_above: a validation loss above this counts as diverged; ``None``: only one that is not finite.
        optimizer: import path of the class that the module is to train with; not checked if it has no dot.
    """

    current: ClassVar[Recorder | None] = None
    """The recorder of this process's training: who started it through the command has no other way to it."""

    def __init__(
        self,
        folder: str,
        metric: str = "val_loss",
        diverged_above: float | None = None,
        optimizer: str | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.folder = Path(folder)
        self.metric = metric
        self.diverged_above = diverged_above
        self.trainer: Trainer | None = None
        self.curve: list[tuple[int, float]] = []
        self.train_curve: list[tuple[int, float]] = []
        self.step = 0
        self.seconds = 0.0
        self._unread: list[tuple[int, Tensor]] = []
        self._before: dict[str, Any] = {}  # metrics at the start of the validation
        self._started = 0.0
        self._written = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Say that the data is prepared, which Lightning does before this hook."""
        Recorder.current = self
        self.trainer = trainer
        self._write_progress()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock.

        Raises:
            ConfigurationError: the module trains with another optimizer than the one that was asked for.
        """
        if self.optimizer is not None and "." in self.optimizer:
            _check_optimizer(self.optimizer, trainer)
        self._started = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the loss; read it later, because reading waits for the device."""
        self.step = trainer.global_step
        self.seconds = time.monotonic() - self._started
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if not isinstance(loss, Tensor):
            loss = trainer.callback_metrics.get("train_loss")
        if isinstance(loss, Tensor):
            self._unread.append((self.step, loss.detach().clone()))
        if len(self._unread) >= _READ_EVERY:
            self._read()
        if time.monotonic() - self._written > _WRITE_EVERY_SECONDS:
            self._write_progress()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        self._read()
        self.seconds = time.monotonic() - self._started

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember what others have logged: a loss of the training is one on older weights."""
        self._before = dict(trainer.callback_metrics)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the validation loss.

        Raises:
            ConfigurationError: the validation logs no such metric.
        """
        metrics = {n: m for n, m in trainer.callback_metrics.items() if m is not self._before.get(n)}
        if self.metric not in metrics:
            known = ", ".join(sorted(metrics)) or "nothing"
            raise ConfigurationError(
                f"metric: the validation logs no {self.metric!r}; it logs {known}: name what validation_step logs"
            )
        if trainer.sanity_checking:
            return
        self._read()
        step, value = trainer.global_step, float(metrics[self.metric])
        self._check("validation", step, value)
        self.curve.append((step, value))
        if self.diverged_above is not None and value > self.diverged_above:
            raise DivergedError(f"the validation loss at step {step} is {value:.4g}, above {self.diverged_above:g}")

    def _read(self) -> None:
        if not self._unread:
            return
        steps = [step for step, _ in self._unread]
        losses = torch.stack([loss.float().mean() for _, loss in self._unread]).tolist()
        self._unread.clear()
        for step, loss in zip(steps, losses):
            self._check("training", step, loss)
            self.train_curve.append((step, loss))

    def _check(self, kind: str, step: int, loss: float) -> None:
        if not math.isfinite(loss):
            raise DivergedError(f"the {kind} loss at step {step} is {loss}")

    def _write_progress(self) -> None:
        total = self.trainer.max_steps if self.trainer is not None else -1
        with contextlib.suppress(OSError):  # a disk that is full now may have room when the result is written
            (self.folder / PROGRESS).write_text(f"{self.step}/{total}" if total > 0 else str(self.step))
        self._written = time.monotonic()


def _check_optimizer(class_path: str, trainer: Trainer) -> None:
    wanted, found = pkgutil.resolve_name(class_path), trainer.optimizers[0]
    if isinstance(wanted, type) and not isinstance(found, wanted):
        raise ConfigurationError(
            f"the module trains with {type(found).__name__}, not with {wanted.__name__}, which it was given as its"
            " argument 'optimizer': let configure_optimizers return self.optimizer(self.named_parameters())"
        )
