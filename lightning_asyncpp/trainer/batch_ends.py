"""Callbacks whose ``on_train_batch_end`` is called after the batch's own update.

In an asynchronous pipeline the update of batch t is applied in or after batch t+1, or at the end of batch t if the
pipeline drains there. A callback that reads or changes weights could thus be called before or after the update. Called
between update t and update t+1, it does to W_{t+1} what it does in a single process.

With gradient accumulation several batches share update t, and only the hook of the last one has to wait for it. The
earlier hooks come after update t-1 and change W_t, to which update t is then applied. Mini-batch t runs at W_{t-1}, so
none of its gradients sees the change. Without delay, and in the first mini-batches, mini-batch t runs at W_t itself:
the batches after the hook see the change and those before it do not, so the pipeline drains in between. It also drains
with the least staleness, under which the later microbatches of mini-batch t run at W_t.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import lightning as L
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import Checkpoint, WeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from lightning_asyncpp.core.randomness import drawing_from
from lightning_asyncpp.core.ranks.agreement import exchange
from lightning_asyncpp.core.session import PipelineSession
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.trainer import private

C = TypeVar("C", bound=Callback)
HOOK = "on_train_batch_end"
_MARK = "_asyncpp_after_own_update"
_READS = "hooks that read weights"
_MAY_CHANGE = "hooks that may change weights"


def after_own_update(callback: C) -> C:
    """Call a callback's ``on_train_batch_end`` with the weights of its batch's own update, as in a single process.

    Use it for callbacks that read or change weights after every update, such as a mean of weights. In an asynchronous
    pipeline the hook of batch t is then called once update t has been applied, which is in the middle of batch t+1
    unless the pipeline drained; the hook may not save or evaluate. Under other strategies the call is unchanged.

    Returns:
        The callback.
    """
    vars(callback)[_MARK] = True
    return callback


class _BatchEnd(NamedTuple):
    """End of a batch.

    Attributes:
        updates: number of updates that a single process applies before it.
        first: number of the first microbatch after it.
        arguments: arguments of the hooks, after the trainer and the module.
    """

    updates: int
    first: int
    arguments: tuple[Any, ...]


class BatchEnds(Callback):
    """Queue of ``on_train_batch_end`` calls, each made in order and exactly once when its update has been applied.

    Until :meth:`release`, it calls these hooks in place of the trainer: the module's own, those of callbacks marked by
    :func:`after_own_update`, and those of Lightning's callbacks that average weights. They come before the callbacks
    that save.

    Args:
        module: module that is trained.
        session: the pipeline.
        trainer: owner of the callbacks.

    Attributes:
        waiting: ends of batches whose hooks are still to be called.
        kinds: kinds of the callbacks on all ranks: they read weights, or may change them.
    """

    def __init__(self, module: LightningModule, session: PipelineSession, trainer: L.Trainer) -> None:
        self._module, self._session, self._trainer = module, session, trainer
        self.waiting: deque[_BatchEnd] = deque()
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
        # A callback may exist on some ranks only, but all ranks must drain alike.
        self.kinds = {*exchange(session.running().mesh, own)} - {""}

    def release(self) -> None:
        """Restore the hooks."""
        self.waiting.clear()
        for owner in self._called:
            vars(owner).pop(HOOK, None)
        self._called = []

    def meets_gradients(self) -> bool:
        """Return whether the pipeline drains for the hooks after this batch.

        It drains if the hooks may change weights at which the mini-batch is still running. It also drains if one
        process runs all stages: they apply an update one after the other, but the hooks are called once. A drain costs
        no time there.
        """
        engine, trainer = self._session.running(), self._trainer
        # Not this rank's own gradient: a rank that skipped a step would drain alone, for a gradient that is discarded.
        goes_on = (trainer.fit_loop.epoch_loop.batch_idx + 1) % trainer.accumulate_grad_batches != 0
        return len(engine.parts) > 1 or (_MAY_CHANGE in self.kinds and goes_on and engine.at_newest)

    def check_drain(self) -> None:
        """Refuse a drain inside a hook that is called in the middle of the next batch.

        Raises:
            ConfigurationError: such a hook is running.
        """
        if self._is_late:
            raise ConfigurationError(
                f"{HOOK} of a callback after its own update saves a checkpoint, gathers weights or evaluates: it runs"
                " between two updates, in the middle of the next batch; do that in another callback's"
                " on_train_batch_end (ModelCheckpoint saves every_n_train_steps), or in on_train_epoch_end"
            )

    @override
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: LightningModule, *arguments: Any) -> None:
        """Call the hooks, now or when the batch's update has been applied."""
        engine = self._session.running()
        self.waiting.append(_BatchEnd(engine.mini_batch, engine.next_forward, arguments))
        self._call_due()

    def call_late(self) -> None:
        """Call, in the middle of a later batch, the hooks of batches whose updates have just been applied."""
        self._is_late = True
        try:
            # A drain may be called by an evaluation, which disables gradients.
            with torch.inference_mode(False), torch.enable_grad():
                self._call_due()
        finally:
            self._is_late = False

    def _call_due(self) -> None:
        while self.waiting and self.waiting[0].updates <= self._session.running().updates.applied:
            end = self.waiting.popleft()
            # Hooks do not use the process's generators: their state depends on when the hook is called and on whether
            # the stage reads data. All ranks draw the same numbers, since a hook may write them into weights.
            engine = self._session.running()
            draws = drawing_from(self._session.seed, engine.runner.device, "batch end", end.first)
            with draws, private.running_hook(self._module, HOOK):
                for hook in self._hooks:
                    hook(*end.arguments)
            engine.weights.adopt(unseen=True)


def _nothing(*_: Any) -> None:
    """Replace a hook that the trainer would call too early."""
