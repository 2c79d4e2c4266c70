"""Callbacks whose ``on_train_batch_end`` is called when the update of that batch has been applied.

In an asynchronous pipeline the update of batch t is applied during or after batch t+1, or at the end of batch t if the
pipeline drains there (finishes all microbatches in flight and applies their updates). At the end of batch t a callback
would usually meet weights without update t. So the callback is called between the updates t and t+1. The weights are
then W_{t+1} (W_t are the weights before update t), as in a single process.

With gradient accumulation several batches, which form mini-batch t, share update t. Only the hook of the last batch has
to wait for this update. The hooks of the earlier batches are called after update t-1 and may change W_t. The change
does not matter if all microbatches of mini-batch t run on W_{t-1}. But with ``delay=0``, in the first mini-batches, and
with ``staleness="least"``, some of them run on W_t. Then the microbatches before a hook must run on W_t without the
hook's change, and those after the hook on W_t with the change. So the pipeline drains before such a hook.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import lightning as L
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import Checkpoint, WeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from lightning_asyncpp.core.randomness import drawing_from
from lightning_asyncpp.core.ranks.agreement import all_gather_object
from lightning_asyncpp.core.session import PipelineSession
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.trainer import private

C = TypeVar("C", bound=Callback)
HOOK = "on_train_batch_end"
_MARK = "_asyncpp_after_own_update"
_READS = "hooks that read weights"
_MAY_CHANGE = "hooks that may change weights"


def after_own_update(callback: C) -> C:
    """Have a callback's ``on_train_batch_end`` called after the update of its batch, as in a single process.

    Use it for callbacks that read or change weights after every update, such as a mean of weights. In an asynchronous
    pipeline the hook of batch t is then called once update t has been applied, usually in the middle of batch t+1, so
    the hook may not save or evaluate. Under other strategies nothing changes.

    Returns:
        The callback.
    """
    vars(callback)[_MARK] = True
    return callback


class BatchEnds(Callback):
    """Callback that queues calls of ``on_train_batch_end`` until the update of their batch has been applied.

    Until :meth:`release`, it calls these hooks in place of the trainer, before the callbacks that save: those of
    callbacks marked by :func:`after_own_update` and of Lightning's callbacks that average weights, in the trainer's
    order, then the module's hook.

    Args:
        module: module that is trained.
        session: the pipeline.
        trainer: trainer of the run.

    Attributes:
        waiting: for each batch whose hooks are still to be called, the number of updates to apply before that, the
            first microbatch after the batch, and the hooks' arguments without trainer and module.
        kinds: kinds of the hooks on all ranks: they read weights, or may change them.
    """

    def __init__(self, module: LightningModule, session: PipelineSession, trainer: L.Trainer) -> None:
        self._module, self._session, self._trainer = module, session, trainer
        self.waiting: deque[tuple[int, int, tuple[Any, ...]]] = deque()
        self._is_late = False
        callbacks = [c for c in trainer.callbacks if not isinstance(c, BatchEnds)]  # type: ignore[attr-defined]
        self._called: list[Any] = [c for c in callbacks if isinstance(c, WeightAveraging) or vars(c).get(_MARK)]
        if self._called or is_overridden(HOOK, module):
            place = next((i for i, c in enumerate(callbacks) if isinstance(c, Checkpoint)), len(callbacks))
            callbacks.insert(place, self)
        trainer.callbacks = callbacks  # type: ignore[attr-defined]
        self._hooks: list[Callable[..., Any]] = [partial(getattr(c, HOOK), trainer, module) for c in self._called]
        if is_overridden(HOOK, module):
            self._called.append(module)
            self._hooks.append(getattr(module, HOOK))
        for owner in self._called:
            vars(owner)[HOOK] = _nothing
        reads_only = all(isinstance(owner, WeightAveraging) for owner in self._called)
        own = "" if not self._called else _READS if reads_only else _MAY_CHANGE
        # A callback may exist on some ranks only, but all ranks must drain after the same batches.
        self.kinds = {*all_gather_object(session.running().mesh, own)} - {""}

    def release(self) -> None:
        """Restore the hooks."""
        self.waiting.clear()
        for owner in self._called:
            vars(owner).pop(HOOK, None)
        self._called = []

    def meets_gradients(self) -> bool:
        """Return whether the pipeline must drain before the hooks of this batch are called.

        It drains if the hooks may change weights on which the rest of the mini-batch runs. It also drains if one
        process runs all stages, since the stages apply an update one after the other, but the hooks are called once. A
        drain costs no time in one process.
        """
        engine, trainer = self._session.running(), self._trainer
        # The Trainer's count decides, since it is the same on all ranks; a rank may have skipped a step.
        goes_on = (trainer.fit_loop.epoch_loop.batch_idx + 1) % trainer.accumulate_grad_batches != 0
        return len(engine.stages) > 1 or (_MAY_CHANGE in self.kinds and goes_on and engine.next_batch_may_use_newest)

    def check_drain(self) -> None:
        """Refuse a drain while a hook of an earlier batch is called in the middle of a batch.

        Raises:
            ConfigurationError: such a hook is running.
        """
        if self._is_late:
            raise ConfigurationError(
                f"a hook {HOOK} that is called after the update of its batch, during the next batch, saves a"
                " checkpoint, gathers weights or evaluates, which is impossible in the middle of a batch. Do that in"
                " another callback's on_train_batch_end (ModelCheckpoint saves every_n_train_steps), or in"
                " on_train_epoch_end"
            )

    @override
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: LightningModule, *arguments: Any) -> None:
        """Call the hooks, now or when the batch's update has been applied."""
        engine = self._session.running()
        self.waiting.append((engine.mini_batch, engine.next_forward, arguments))
        self._call_due()

    def call_late(self) -> None:
        """Call the hooks of earlier batches whose updates have just been applied, in the middle of a batch."""
        self._is_late = True
        try:
            # Gradients may be disabled here, since an evaluation may cause a drain.
            with torch.inference_mode(False), torch.enable_grad():
                self._call_due()
        finally:
            self._is_late = False

    def _call_due(self) -> None:
        while self.waiting and self.waiting[0][0] <= self._session.running().updates.num_applied:
            _, first, arguments = self.waiting.popleft()
            # Hooks draw from a seed of the batch, since the state of the process's generators depends on when the hook
            # is called. The seed is the same on all ranks, since a hook may write random numbers into weights.
            engine = self._session.running()
            draws = drawing_from(self._session.seed, engine.runner.device, "batch end", first)
            with draws, private.running_hook(self._module, HOOK):
                for hook in self._hooks:
                    hook(*arguments)
            engine.weights.adopt(unseen=True)


def _nothing(*_: Any) -> None:
    """Replace a hook that the trainer would call too early."""
