"""Older checkpoints that a callback removes once the newer one is there, also if the process ends in between.

``ModelCheckpoint`` forgets the older one before it saves: the newer one's state does not name it, and nobody would ever
remove it. So a checkpoint says which one it is about to replace, and a run that goes on from it removes that one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

SUPERSEDED = "superseded"
"""Entry of a checkpoint's state of a strategy: the paths."""


class Superseded:
    """What callbacks kept when the newest checkpoint but one was saved; of rank 0."""

    def __init__(self) -> None:
        self._kept: set[str] | None = None
        self._left: list[str] = []

    def begin(self, left: Sequence[str]) -> None:
        """A run begins.

        Args:
            left: what the checkpoint names that it goes on from.
        """
        self._kept, self._left = None, [path for path in left if isinstance(path, str)]

    def now(self, trainer: L.Trainer) -> list[str]:
        """What a save that is about to be made takes the place of."""
        before, self._kept = self._kept, _kept_by_callbacks(trainer)
        return [] if before is None else sorted(before - self._kept)

    def remove_left(self, trainer: L.Trainer, remove: Callable[[str], None]) -> None:
        """Remove what the run that ended had no time to remove, once callbacks know what they keep.

        Args:
            trainer: with the callbacks.
            remove: does it.
        """
        left, self._left = self._left, []
        self._kept = _kept_by_callbacks(trainer)
        resumed_from = [str(trainer.ckpt_path)] if trainer.ckpt_path else []
        needed = {os.path.realpath(path) for path in (*self._kept, *resumed_from)}
        folders = {Path(c.dirpath).resolve() for c in _callbacks(trainer) if c.dirpath is not None}
        for path in left:
            in_place = not folders.isdisjoint(Path(path).resolve().parents)  # it may have been moved, and is another's
            if in_place and os.path.realpath(path) not in needed and os.path.lexists(path):
                remove(path)


def _callbacks(trainer: L.Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


def _kept_by_callbacks(trainer: L.Trainer) -> set[str]:
    """Paths that their callbacks replace by others, one day."""
    kept: set[str] = set()
    for callback in _callbacks(trainer):
        if callback.monitor is not None and callback.save_top_k > 0:
            kept.update(callback.best_k_models)
        if callback.monitor is None and callback.save_top_k == 1:
            kept.add(callback.best_model_path)
        if callback.save_last:
            kept.add(callback.last_model_path)
    return kept - {""}
