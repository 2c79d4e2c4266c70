"""Paths that callbacks take up from a checkpoint, and remove one day.

A checkpoint is data, and may be anybody's. ``ModelCheckpoint`` removes what lies in its folder by the text of the path,
in which ``..``, a link or a URL may lead anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_asyncpp.storage.names import is_inside, local_path
from lightning_asyncpp.storage.removal import is_checkpoint

_BEST, _BEST_K, _KTH, _LAST = "best_model_path", "best_k_models", "kth_best_model_path", "last_model_path"


def drop_foreign_paths(trainer: L.Trainer, content: Mapping[str, Any]) -> None:
    """Drop what is not in a callback's folder, or is no checkpoint, from the states that callbacks are about to load.

    Args:
        trainer: with the callbacks, which know their folders.
        content: of a checkpoint; changed.
    """
    states = content.get("callbacks")
    if not isinstance(states, Mapping):
        return
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
            state = states.get(callback.state_key, states.get(type(callback)))
            if isinstance(state, dict) and (dropped := _drop_foreign(callback, state)):
                rank_zero_warn(
                    f"the checkpoint names {', '.join(map(repr, dropped))} as what {type(callback).__name__} has kept:"
                    f" no checkpoint in {callback.dirpath}, so nothing of it is replaced or removed"
                )


def looks_inside(trainer: L.Trainer, path: Any) -> bool:
    """Whether a path of this machine lies in a callback's folder by its text, and leads out of it."""
    folders = [folder for callback in trainer.checkpoint_callbacks if (folder := getattr(callback, "dirpath", None))]
    local = local_path(path)
    if local is None or not folders or any(is_inside(path, folder) for folder in folders):
        return False
    # As Lightning looks at it, which does not look at a URL, though this one is of a file of this machine.
    return "://" in str(path) or any(Path(folder).absolute() in local.absolute().parents for folder in folders)


def _drop_foreign(callback: ModelCheckpoint, state: dict[str, Any]) -> list[str]:
    """Drop them from the state of one callback, and return what they were."""
    kept = state.get(_BEST_K, {})
    models = kept if isinstance(kept, Mapping) else {kept: None}
    if state.get("dirpath", callback.dirpath) != callback.dirpath:  # of the others Lightning takes up none
        path = state.get(_BEST)
        is_plain = isinstance(path, str) and local_path(path) is not None and ".." not in Path(path).parts
        own = dict(models)
        names: tuple[str, ...] = () if is_plain else (_BEST,)
    else:
        own = {path: value for path, value in models.items() if _is_own(callback, path) and _is_number(value)}
        names = (_BEST, _KTH, _LAST)
    foreign = [name for name in names if state.get(name) and not _is_own(callback, state[name])]
    dropped = [*(state[name] for name in foreign), *(path for path in models if path not in own)]
    state.update(dict.fromkeys(foreign, ""))
    if len(own) < len(models):
        state[_BEST_K] = own
        if state.get(_KTH) not in own:
            worst = max if callback.mode == "min" else min
            state[_KTH] = worst(own, key=own.__getitem__) if own else ""
            state["kth_value"] = own.get(state[_KTH])
    return list(dict.fromkeys(str(path) for path in dropped))


def _is_own(callback: ModelCheckpoint, path: Any) -> bool:
    """Whether it is in the callback's folder, and a checkpoint if it is there."""
    if not isinstance(path, str) or not is_inside(path, callback.dirpath):
        return False
    local = local_path(path)
    return local is None or not local.exists() or is_checkpoint(local)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
