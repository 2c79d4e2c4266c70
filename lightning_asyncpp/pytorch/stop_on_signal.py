"""The same end on a signal for a strategy whose ranks run whole models, in Lightning's own loops."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_asyncpp.pytorch import private
from lightning_asyncpp.pytorch.loop_state import ResumedLoops
from lightning_asyncpp.pytorch.preemption import Preemption
from lightning_asyncpp.pytorch.progress import Progress


class StopOnSignal(Callback):
    """Ends a run on SIGTERM or SIGUSR1 as the pipeline strategies do.

    On one device it ends after the batch of training or of an evaluation in which the signal came; several agree before
    every training batch, as Lightning has it, and never in the middle of an evaluation.

    Args:
        trainer: whose callbacks it stands in front of, once it is installed.
        progress: of this rank.
    """

    def __init__(self, trainer: L.Trainer, progress: Progress) -> None:
        self.preemption = Preemption(trainer, lambda: self._note(trainer))
        self._progress = progress
        self._resumed = ResumedLoops(trainer, progress)
        self._agreed = False

    def install(self, trainer: L.Trainer) -> None:
        """Take over what Lightning does on signals."""
        callbacks = [c for c in trainer.callbacks if not isinstance(c, StopOnSignal)]  # type: ignore[attr-defined]
        trainer.callbacks = [self, *callbacks]  # type: ignore[attr-defined]
        private.replace_sigterm_broadcast(trainer, lambda: self._agree(trainer))
        private.replace_signal_handlers(trainer, self.preemption.receive, self._resumed.before_training)

    def on_train_start(self, trainer: L.Trainer, pl_module: LightningModule) -> None:
        """Go on with the metrics of a run that was resumed, and mend what Lightning counts in it."""
        self._progress.begin(trainer, pl_module)
        self._resumed.at_start()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: LightningModule) -> None:
        """Begin an epoch."""
        self._progress.begin_epoch()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: LightningModule) -> None:
        """End the epoch in which a run was resumed as any other."""
        self._progress.remember_if_cut_short(trainer, pl_module, {})
        self._resumed.at_epoch_end()

    def on_validation_start(self, trainer: L.Trainer, pl_module: LightningModule) -> None:
        """Let a resumed run go on counting its steps."""
        self._resumed.at_validation()

    def on_exception(self, trainer: L.Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save what a restart goes on from; a collective call if all ranks agreed."""
        if isinstance(exception, SIGTERMException) and (self._agreed or trainer.world_size == 1):
            self.preemption.end(exception, self._signals(trainer))

    def _note(self, trainer: L.Trainer) -> None:
        if trainer.world_size == 1:
            private.set_received_sigterm(trainer)

    def _agree(self, trainer: L.Trainer) -> None:
        """Ask all ranks, before a training batch."""
        flag = torch.tensor([float(self.preemption.received)], device=trainer.strategy.root_device)
        dist.all_reduce(flag)
        if flag.item():
            self._agreed = True
            raise SIGTERMException

    def _signals(self, trainer: L.Trainer) -> list[int]:
        received: Any = torch.tensor([self.preemption.received], device=trainer.strategy.root_device)
        if trainer.world_size > 1:
            received = trainer.strategy.all_gather(received)
        return [int(number) for number in received.flatten().tolist()]
