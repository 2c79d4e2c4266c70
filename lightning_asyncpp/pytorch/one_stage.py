"""A module that a pipeline has left behind: its ``state_dict()`` holds one stage, which may be taken for the whole."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_asyncpp.pipeline.cut.elsewhere import OtherStage

_left_behind: WeakSet[nn.Module] = WeakSet()
_hooked: WeakSet[nn.Module] = WeakSet()


def warn_of_state_dict(module: LightningModule) -> None:
    """From now on say what is missing when somebody takes the ``state_dict()`` of a cut module or its network; once."""
    if not any(isinstance(layer, OtherStage) for layer in module.modules()):
        return
    for part in _parts(module):
        if part not in _hooked:
            part.register_state_dict_pre_hook(_warn)
            _hooked.add(part)
        _left_behind.add(part)


def leave_alone(module: LightningModule) -> None:
    """Say nothing any more: a strategy takes care of the module again, or of all stages."""
    for part in _parts(module):
        _left_behind.discard(part)


def _parts(module: LightningModule) -> list[nn.Module]:
    network = getattr(module, "model", None)
    return [module, network] if isinstance(network, nn.Module) else [module]


def _warn(module: nn.Module, prefix: str, *_: Any) -> None:
    """Before a ``state_dict()``; with a prefix it is part of another module's."""
    if prefix or module not in _left_behind:
        return
    _left_behind.discard(module)
    rank_zero_warn(
        f"state_dict() of {type(module).__name__} holds the layers of this rank's pipeline stage alone: for all of them"
        " call trainer.strategy.full_state_dict() on every rank, which gathers them on rank 0, or"
        " trainer.save_checkpoint(path)"
    )
