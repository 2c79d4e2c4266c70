"""What a module does at the end of a batch comes before a checkpoint that is saved there, and so is part of it."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_asyncpp.pytorch.module_hooks import Replacement

_HOOK = "on_train_batch_end"


class ModuleFirst(Callback):
    """Calls the module's hook, after the callbacks that save nothing and before those that do, until :meth:`release`.

    Lightning calls it after all of them: what it counts, logs or draws for the batch would be missing in a run that
    goes on from a checkpoint of that batch.

    Args:
        module: whose hook it is.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._hook = module.on_train_batch_end

    def install(self, trainer: L.Trainer) -> None:
        """Take the place in front of the callbacks that save, if the module has a hook."""
        callbacks = [c for c in trainer.callbacks if not isinstance(c, ModuleFirst)]  # type: ignore[attr-defined]
        if is_overridden(_HOOK, self._module):
            place = next((i for i, c in enumerate(callbacks) if isinstance(c, Checkpoint)), len(callbacks))
            callbacks.insert(place, self)
            self._module.__dict__[_HOOK] = Replacement(self._module, _HOOK, lambda *_: None)
        trainer.callbacks = callbacks  # type: ignore[attr-defined]

    def release(self) -> None:
        """Give the hook back."""
        self._module.__dict__.pop(_HOOK, None)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Call the module's."""
        self._hook(outputs, batch, batch_idx)
