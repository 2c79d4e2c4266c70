"""One training of an ablation, in a process that runs many."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_asyncpp import cli
from lightning_asyncpp.errors import NonFiniteGradientError
from research.ablations.recipe import RESULT

LOG = "training.log"


class DivergedError(RuntimeError):
    """A loss is not finite, or above the bound."""


class Recorder(Callback):
    """Records validations, ends a training that diverged, and writes ``result.json``.

    Args:
        folder: where to.
        metric: name of the validation loss as the module logs it.
        diverged_above: a validation loss above this counts as diverged; None: only one that is not finite.
    """

    def __init__(self, folder: str, metric: str = "val_loss", diverged_above: float | None = None) -> None:
        self.folder = Path(folder)
        self.metric = metric
        self.bound = math.inf if diverged_above is None else diverged_above
        self.validations: list[tuple[int, float]] = []
        self.started = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self.started = time.monotonic()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the validation loss."""
        if trainer.sanity_checking:
            return
        loss = float(trainer.callback_metrics[self.metric])
        self.validations.append((trainer.global_step, loss))
        if not loss <= self.bound or math.isinf(loss):
            raise DivergedError(f"the validation loss at step {trainer.global_step} is {loss}")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the result: the last validation."""
        step, loss = self.validations[-1]
        self._write(trainer, loss)
        print(f"{self.metric} at step {step}: {loss}")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write that the training diverged, if that ended it."""
        if isinstance(exception, (DivergedError, NonFiniteGradientError)):
            self._write(trainer, None)

    def _write(self, trainer: Trainer, loss: float | None) -> None:
        result = {
            "loss": loss,
            "steps": trainer.global_step,
            "seconds": time.monotonic() - self.started,
            "curve": [(step, "val_loss", value) for step, value in self.validations],
        }
        new = self.folder / f"{RESULT}.new"
        new.write_text(json.dumps(result), encoding="utf-8")
        new.replace(self.folder / RESULT)


def prepare(parent: int, threads: int, gpu: str) -> None:
    """Set a process up for trainings; it ends with ``parent``, and leaves an interrupt from the keyboard to it.

    Args:
        parent: number of the process that started this one.
        threads: threads of torch.
        gpu: number of the only GPU that it sees; "" for none.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    torch.set_num_threads(threads)
    torch._dynamo.config.recompile_limit = 256  # models of all shapes share their compiled code
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def train(folder: Path) -> None:
    """Train what the folder's ``fit.yaml`` says; what is printed goes into its log. An error ends the process."""
    with (folder / LOG).open("wb") as log:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(log.fileno(), stream.fileno())
    try:
        cli.run(["fit", "--config", str(folder / "fit.yaml")])
    except (DivergedError, NonFiniteGradientError):
        pass  # a result
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
