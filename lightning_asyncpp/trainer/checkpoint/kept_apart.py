"""What the stages keep apart in a Trainer's checkpoint: states of callbacks, and what ``on_save_checkpoint`` adds.

Lightning writes what rank 0 says. Where all stages say the same, so does a pipeline; where they do not, the file holds
what one process would write, and beside it what each stage had: see :mod:`lightning_asyncpp.core.checkpoint.apart`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import lightning as L
from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_asyncpp.core.checkpoint.apart import (
    APART,
    BELOW,
    KEYS,
    Names,
    cannot_be_assigned,
    cannot_travel,
    own_entries,
    unite_entries,
)
from lightning_asyncpp.core.checkpoint.state import PIPELINE
from lightning_asyncpp.core.ranks.mesh import Mesh

_CALLBACKS = "callbacks"
# What Lightning itself writes beside them is the same on all ranks, or belongs to a rank's progress.
_LIGHTNINGS_OWN = frozenset(
    ("epoch", "global_step", "pytorch-lightning_version", "state_dict", "loops", "optimizer_states", "lr_schedulers")
) | {PIPELINE, _CALLBACKS}
_HYPER_PARAMETERS = (LightningModule.CHECKPOINT_HYPER_PARAMS_KEY, L.LightningDataModule.CHECKPOINT_HYPER_PARAMS_KEY)
_Path = tuple[str, ...]
_WEIGHTS: _Path = ("state_dict",)


class Given(NamedTuple):
    """The ``state_dict`` that Lightning was given for a checkpoint, before hooks changed it.

    Attributes:
        state: name -> tensor.
        own: names of this stage's part.
    """

    state: Mapping[str, Any]
    own: frozenset[str]

    def of_others(self) -> dict[int, Any]:
        """The tensors of other stages in it, by their id."""
        return {id(tensor): tensor for name, tensor in self.state.items() if name not in self.own}

    def was_changed(self, state: Mapping[str, Any]) -> bool:
        """Whether hooks have put other tensors into a checkpoint."""
        return state.keys() != self.state.keys() or any(state[n] is not t for n, t in self.state.items())


def unite_stages(mesh: Mesh, trainer: L.Trainer, checkpoint: dict[str, Any], given: Given | None) -> list[Any]:
    """Put what all stages keep into the checkpoint on rank 0; a blocking collective.

    Args:
        mesh: this rank's place.
        trainer: that saves.
        checkpoint: what it holds on this rank; on rank 0 it is changed in place.
        given: the weights that it held before hooks changed them; None: they are not in it.

    Returns:
        On rank 0 what each stage had apart, first stage first, for :func:`hand_back`; empty if nothing was.
    """
    others = {} if given is None else given.of_others()
    own = {path: _without_tensors(value, others) for path, value in _entries(trainer, checkpoint).items()}
    marks = {}
    if given is not None:
        own[_WEIGHTS] = _without_tensors(checkpoint[_WEIGHTS[0]], others)
        changed = given.was_changed(checkpoint[_WEIGHTS[0]])
        marks[json.dumps(_WEIGHTS)] = f"changed on stage {mesh.stage}" if changed else ""
    by_name = {json.dumps(path): value for path, value in own.items()}
    united = unite_entries(mesh, by_name, lambda name: _described(tuple(json.loads(name))), marks)
    for name, value in united.entries.items():
        _put(checkpoint, tuple(json.loads(name)), value)
    if united.lost:
        rank_zero_warn(cannot_travel(united.lost))
    apart = [_without_weights(difference) for difference in united.differences]
    return apart if any(difference is not None for difference in apart) else []


def hand_back(mesh: Mesh, network: Names, checkpoint: dict[str, Any], partition: Sequence[int]) -> None:
    """Give this stage what it had of a checkpoint, in place; other stages than those that wrote it what is theirs now.

    Args:
        mesh: this rank's place.
        network: which names are elsewhere.
        checkpoint: what all stages had.
        partition: layers on each stage.
    """
    state: Any = checkpoint.get(PIPELINE)
    if state is None:
        return
    found = {json.dumps(path): value for path, value in _all_entries(checkpoint).items()}
    own, unclear = own_entries(mesh, partition, network, found, state, lambda name: _described(tuple(json.loads(name))))
    state.pop(APART, None)
    if unclear:
        rank_zero_warn(cannot_be_assigned(unclear, state))
    for name in found:
        _put(checkpoint, tuple(json.loads(name)), own.get(name), remove=name not in own)


def _all_entries(checkpoint: Mapping[str, Any]) -> dict[_Path, Any]:
    """What :func:`_entries` may have given, when it was written."""
    found: dict[_Path, Any] = {(_CALLBACKS, key): value for key, value in (checkpoint.get(_CALLBACKS) or {}).items()}
    return found | {(key,): value for key, value in checkpoint.items() if key not in _LIGHTNINGS_OWN}


def _entries(trainer: L.Trainer, checkpoint: Mapping[str, Any]) -> dict[_Path, Any]:
    """What users' code has put into a checkpoint, by its path there."""
    own_states = {c.state_key for c in trainer.callbacks if not _is_lightnings(c)}  # type: ignore[attr-defined]
    states = checkpoint.get(_CALLBACKS) or {}
    found: dict[_Path, Any] = {(_CALLBACKS, key): value for key, value in states.items() if key in own_states}
    for key, value in checkpoint.items():
        if key not in _LIGHTNINGS_OWN and not key.startswith(("hparams_", "datamodule_hparams_", *_HYPER_PARAMETERS)):
            found[(key,)] = value
    return found


def _is_lightnings(callback: L.Callback) -> bool:
    """Whether a callback's state is Lightning's, which all ranks agree on, or which is rank 0's (a time)."""
    where = getattr(callback.state_dict, "__module__", "")
    return where.startswith(("lightning.", "pytorch_lightning.", "lightning_asyncpp."))


def _without_tensors(value: Any, left_out: Mapping[int, Any]) -> Any:
    """A mapping without what is in it of other stages."""
    if not left_out or not isinstance(value, Mapping):
        return value
    return {k: child for k, child in value.items() if not isinstance(child, Tensor) or id(child) not in left_out}


def _without_weights(difference: Any) -> Any:
    """They are loaded by their names."""
    name = json.dumps(_WEIGHTS)
    if difference is None or name not in difference[KEYS]:
        return difference
    keys = [key for key in difference[KEYS] if key != name]
    return {KEYS: keys, BELOW: {k: d for k, d in difference[BELOW].items() if k != name}} if keys else None


def _described(path: _Path) -> str:
    return "checkpoint" + "".join(f"[{key!r}]" for key in path)


def _put(checkpoint: dict[str, Any], path: _Path, value: Any, remove: bool = False) -> None:
    *above, last = path
    node = checkpoint
    for key in above:
        node = node.setdefault(key, {})
    if remove:
        node.pop(last, None)
    else:
        node[last] = value
