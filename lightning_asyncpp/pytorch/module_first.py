"""What a module does at the end of a batch comes before a checkpoint that is saved there, and so is part of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import lightning as L
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import Checkpoint, WeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_asyncpp.pytorch.module_hooks import Replacement

C = TypeVar("C", bound=Callback)
Hook = Callable[[L.Trainer, LightningModule, Any, Any, int], None]
HOOK = "on_train_batch_end"
_MARK = "_asyncpp_after_own_update"


def after_own_update(callback: C) -> C:
    """Have a callback's ``on_train_batch_end`` see the weights of its batch's own update, as a single process does.

    For callbacks that read or change weights after every update, such as a mean of weights. In an asynchronous
    pipeline the hook of batch t is then called once update t has been applied, which is in the middle of batch t+1
    unless the pipeline drained; it may not save or evaluate. Under the other strategies that is where it is anyway.

    Returns:
        The callback.
    """
    vars(callback)[_MARK] = True
    return callback


class _Taken(NamedTuple):
    """A hook that was taken out of Lightning's hands.

    Attributes:
        owner: the module or the callback.
        own: what its instance had under the hook's name; None if its class alone has it.
        call: the hook.
    """

    owner: Any
    own: Any
    call: Hook


class ModuleFirst(Callback):
    """Calls the module's hook, after the callbacks that save nothing and before those that do, until :meth:`release`.

    Lightning calls it after all of them: what it counts, logs or draws for the batch would be missing in a run that
    goes on from a checkpoint of that batch. Callbacks that :func:`after_own_update` marked, and Lightning's that
    average weights, come right before it.

    Args:
        module: whose hook it is.

    Attributes:
        around: makes what the hooks run in.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext
        self._taken: list[_Taken] = []

    def install(self, trainer: L.Trainer) -> None:
        """Take the place in front of the callbacks that save, if there are hooks to call."""
        callbacks = [c for c in trainer.callbacks if not isinstance(c, ModuleFirst)]  # type: ignore[attr-defined]
        for callback in callbacks:
            if _comes_after_own_update(callback):
                self._take(callback, getattr(callback, HOOK))
        if is_overridden(HOOK, self._module):
            hook = self._module.on_train_batch_end
            self._take(self._module, lambda trainer, module, *args: hook(*args))
        if self._taken:
            place = next((i for i, c in enumerate(callbacks) if isinstance(c, Checkpoint)), len(callbacks))
            callbacks.insert(place, self)
        trainer.callbacks = callbacks  # type: ignore[attr-defined]

    def release(self) -> None:
        """Give the hooks back."""
        for owner, own, _ in self._taken:
            vars(owner).pop(HOOK, None)
            if own is not None:
                vars(owner)[HOOK] = own
        self._taken.clear()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Call the hooks."""
        with self.around():
            self._call(trainer, outputs, batch, batch_idx)

    def _call(self, trainer: L.Trainer, outputs: Any, batch: Any, batch_idx: int) -> None:
        for taken in self._taken:
            taken.call(trainer, self._module, outputs, batch, batch_idx)

    def _take(self, owner: Any, call: Hook) -> None:
        self._taken.append(_Taken(owner, vars(owner).get(HOOK), call))
        vars(owner)[HOOK] = Replacement(owner, HOOK, lambda *_: None)


def _comes_after_own_update(callback: Callback) -> bool:
    return isinstance(callback, WeightAveraging) or bool(vars(callback).get(_MARK))
