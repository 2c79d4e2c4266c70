"""How far a training has come beside its weights and Lightning's loops: its data, and its random numbers.

Every rank has its own: a checkpoint holds them by rank, and after a change of the stages a rank takes up those of the
last stage of its replica, which is where the loss was computed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch

from lightning_asyncpp.core.randomness import random_states, set_random_states
from lightning_asyncpp.strategy_parts.resumable_loader import ResumableLoader, warn_if_inexact
from lightning_asyncpp.strategy_parts.shuffling import shuffle_by_epoch
from lightning_asyncpp.strategy_parts.stage_loader import PlaceholderLoader
from lightning_asyncpp.trainer import private

PROGRESS = "progress"
"""Entry of a checkpoint's state of a strategy: by rank, what :meth:`Progress.state` returned."""


class Progress:
    """The progress of one rank."""

    def __init__(self) -> None:
        self._loaders: list[ResumableLoader] = []
        self._epoch_of_loaders = -1  # for which they were made: they may be made anew every few epochs
        self._state: Mapping[str, Any] | None = None  # of a checkpoint, until training starts
        self._loops: Mapping[str, Any] = {}
        self._same_replicas, self._has_warned = True, False
        self._training: Mapping[str, Any] | None = None  # its random numbers, while a validation runs

    def state(self, trainer: L.Trainer) -> dict[str, Any]:
        """What this rank must remember; the newest metrics, too, which a learning rate may wait for."""
        draws = self._training or (random_states() if self._state is None else self._state["random"])
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        return {"random": draws, "loaders": [loader.state_dict() for loader in self._loaders], "metrics": metrics}

    @contextmanager
    def validating(self) -> Iterator[None]:
        """Let a validation draw random numbers without a change in what the training draws.

        A training that shuffles or augments its data from the process's generators would depend on when it is
        validated, and stages, of which not all run validation steps to their end, would draw different numbers.
        """
        self._training = random_states()
        try:
            yield
        finally:
            set_random_states(self._training)
            self._training = None

    def resume(self, state: Mapping[str, Any], loops: Mapping[str, Any], same_replicas: bool) -> None:
        """Go on from a checkpoint when training starts.

        Args:
            state: of this rank.
            loops: the state of the Trainer's loops in the checkpoint.
            same_replicas: whether as many replicas wrote it: others read other parts of the data.
        """
        self._state, self._loops, self._same_replicas = state, loops, same_replicas
        self._loaders = []

    def start_training(self, trainer: L.Trainer) -> None:
        """Put the random numbers where the checkpoint was, after all that a run draws to begin with."""
        state, self._state = self._state, None
        if state is not None:
            set_random_states(state["random"])
            trainer.callback_metrics.update({name: torch.tensor(value) for name, value in state["metrics"].items()})

    def forget(self) -> None:
        """Begin a run anew: the loaders are those of another one."""
        self._state, self._loaders = None, []

    def training_loader(self, loader: Any, trainer: L.Trainer) -> Any:
        """The loader that is read instead of ``loader``, from where a checkpoint was if there is one."""
        if isinstance(loader, PlaceholderLoader):
            # It says the same of itself as where it is read.
            loader.loader = self.training_loader(loader.loader, trainer)
            return loader
        shuffle_by_epoch(loader)
        if trainer.current_epoch != self._epoch_of_loaders:
            self._loaders, self._epoch_of_loaders = [], trainer.current_epoch
        number = len(self._loaders)
        resumable = ResumableLoader(loader, functools.partial(private.batches_ahead, trainer))
        self._loaders.append(resumable)
        if self._state is not None:
            _go_on_after_epoch(trainer)
            saved = self._state["loaders"]
            state = saved[number] if number < len(saved) else {"batches": 0}
            if self._in_mid_epoch and not self._has_warned:
                reasons = [] if self._same_replicas else ["data_parallel_size is another one"]
                self._has_warned = warn_if_inexact(loader, state, reasons)
            resumable.resume(state, ended=not self._in_mid_epoch)
        return resumable

    @property
    def _in_mid_epoch(self) -> bool:
        progress = self._loops["epoch_loop.batch_progress"]
        return bool(progress["current"]["ready"]) and not progress["is_last_batch"]


def _go_on_after_epoch(trainer: L.Trainer) -> None:
    """Begin with the next epoch where a checkpoint was written at the end of one: Lightning would end that once more.

    Call this when the loops' state was restored and none of them runs yet.
    """
    epochs = trainer.fit_loop.epoch_progress
    counts = epochs.state_dict()["total"]
    if counts["ready"] == counts["processed"] > 0:
        if counts["completed"] < counts["processed"]:
            epochs.increment_completed()
        trainer.fit_loop.epoch_loop.restarting = False
