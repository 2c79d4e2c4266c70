"""Older checkpoints that a callback removes once the newer one is there, also if the process ends in between.

``ModelCheckpoint`` forgets the older one before it saves: the newer one's state does not name it, and nobody would ever
remove it. So a checkpoint says which one it is about to replace, and a run that goes on from it removes that one: if it
is still the same file, which nobody has written anew, and one of this run.

It also saves several checkpoints of one step one after the other. A process that ends in between leaves some that
``last.ckpt`` does not know of: a run that goes on from that writes them again, under their names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_asyncpp.core.checkpoint.origin import PIPELINE
from lightning_asyncpp.core.manifest import MANIFEST, Manifest
from lightning_asyncpp.storage.loading import load
from lightning_asyncpp.storage.names import INDEX, StorageError

SUPERSEDED = "superseded"
"""Entry of a checkpoint's state of a strategy: path -> size in bytes and time of its last change, in nanoseconds."""


class _Resumed(NamedTuple):
    """A run that goes on from its last checkpoint: its name, and after which step."""

    run: str
    step: int


class Superseded:
    """What callbacks kept when the newest checkpoint but one was saved; of rank 0."""

    def __init__(self) -> None:
        self._kept: set[str] | None = None
        self._left: dict[str, list[int]] = {}
        self._resumed: _Resumed | None = None
        self._asked: set[str] = set()  # for which names it was asked whether they are taken

    def begin(self, left: Any) -> None:
        """A run begins.

        Args:
            left: what the checkpoint names that it goes on from.
        """
        named = left if isinstance(left, Mapping) else {}
        self._resumed, self._asked = None, set()
        self._kept, self._left = None, {path: found for path, found in named.items() if isinstance(path, str)}

    def overwrite_later_ones(self, trainer: L.Trainer) -> None:
        """Let callbacks give a checkpoint the name of one that this run wrote before it was interrupted; on all ranks.

        Lightning would give it another one, and nobody would ever remove the earlier one.
        """
        for callback in _callbacks(trainer):
            callback.file_exists = partial(self._is_taken, callback)  # type: ignore[method-assign]

    def _is_taken(self, callback: ModelCheckpoint, filepath: Any, trainer: L.Trainer) -> bool:
        is_first = str(filepath) not in self._asked  # else it may be of this attempt
        self._asked.add(str(filepath))
        if not type(callback).file_exists(callback, filepath, trainer):
            return False
        is_free = is_first and trainer.is_global_zero and self._is_later_one(trainer, str(filepath))
        return not trainer.strategy.reduce_boolean_decision(is_free, all=False)

    def _is_later_one(self, trainer: L.Trainer, path: str) -> bool:
        """Whether this run wrote it, in an attempt that got further than what it goes on from."""
        resumed = self._resumed
        if resumed is None or not _is_in_place(trainer, path) or path in _kept_by_callbacks(trainer):
            return False
        manifest, step = _run_of(path)
        return manifest is not None and manifest.run == resumed.run and step > resumed.step

    def now(self, trainer: L.Trainer) -> dict[str, list[int]]:
        """What a save that is about to be made takes the place of; all earlier ones are there."""
        before, self._kept = self._kept, _kept_by_callbacks(trainer)
        gone = set() if before is None else before - self._kept
        needed = os.path.abspath(str(trainer.ckpt_path)) if trainer.ckpt_path else ""  # Lightning never removes it
        found = {path: _stamp(path) for path in sorted(gone) if os.path.abspath(path) != needed}
        return {path: stamp for path, stamp in found.items() if stamp is not None and _is_in_place(trainer, path)}

    def go_on(self, trainer: L.Trainer, run: str, remove: Callable[[str], None]) -> None:
        """Remove what the run that ended had no time to remove, once callbacks know what they keep.

        Args:
            trainer: with the callbacks.
            run: the name of this run.
            remove: does it.
        """
        left, self._left = self._left, {}
        self._kept = _kept_by_callbacks(trainer)
        self._resumed = _resumed_from_last(trainer, run)
        resumed_from = [str(trainer.ckpt_path)] if trainer.ckpt_path else []
        needed = {os.path.realpath(path) for path in (*self._kept, *resumed_from)}
        for path, stamp in left.items():
            is_same = (found := _stamp(path)) is not None and found == stamp
            is_free = is_same and _is_in_place(trainer, path) and os.path.realpath(path) not in needed
            if is_free and _is_of_run(path, run):
                remove(path)


def _callbacks(trainer: L.Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


def _is_in_place(trainer: L.Trainer, path: str) -> bool:
    """Whether a callback writes there; what has been moved is another's."""
    folders = {Path(c.dirpath).resolve() for c in _callbacks(trainer) if c.dirpath is not None}
    return not folders.isdisjoint(Path(path).resolve().parents)


def _stamp(path: str) -> list[int] | None:
    """Tells a file, or the index of a folder, from one of the same name that was written later."""
    file = os.path.join(path, INDEX) if os.path.isdir(path) else path
    try:
        found = os.stat(file)
    except (OSError, ValueError):
        return None
    return [found.st_size, found.st_mtime_ns]


def _is_of_run(path: str, run: str) -> bool:
    """Whether it is a checkpoint of a training of this run; of what is none, nothing is removed."""
    manifest, _ = _run_of(path)
    return manifest is not None and manifest.run == run


def _run_of(path: str) -> tuple[Manifest | None, int]:
    """Which run wrote a checkpoint, and after which step; None of what is none."""
    try:
        content = load(Path(path))
    except StorageError:
        return None, 0
    state = content.get(PIPELINE) if isinstance(content, Mapping) else None
    manifest = Manifest.of_plain(state.get(MANIFEST)) if isinstance(state, Mapping) else None
    step = content.get("global_step") if manifest is not None else 0
    return manifest, step if isinstance(step, int) else 0


def _resumed_from_last(trainer: L.Trainer, run: str) -> _Resumed | None:
    """None of a run that goes on from another checkpoint: of later ones it may be a branch, and they stay."""
    resumed_from = os.path.realpath(str(trainer.ckpt_path)) if trainer.ckpt_path else ""
    lasts = {os.path.realpath(callback.last_model_path) for callback in _callbacks(trainer) if callback.last_model_path}
    return _Resumed(run, trainer.global_step) if resumed_from in lasts else None


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
