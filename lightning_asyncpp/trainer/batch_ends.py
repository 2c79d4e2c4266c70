"""Callbacks whose end of a batch comes after the batch's own update.

In an asynchronous pipeline the update of batch t is applied in or after batch t+1, or at the end of batch t where the
pipeline drains there. A callback that reads or changes weights would be called before or after it, whichever it happens
to be. Called between update t and update t+1 it does to W_{t+1} what it does in a single process.

Of batches that share update t (gradient accumulation) only the last one's hook has to wait for it. Those before come
after update t-1, and so change W_t, which update t is then applied to. Mini-batch t runs at W_{t-1}, so none of its
gradients sees the change. Without delay, and in the mini-batches before it sets in, it runs at W_t itself: the batches
after the hook see the change and those before it do not, so the pipeline drains in between. So it does with the least
staleness, under which the later microbatches of mini-batch t run at W_t.
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
    """Have a callback's ``on_train_batch_end`` see the weights of its batch's own update, as a single process does.

    For callbacks that read or change weights after every update, such as a mean of weights. In an asynchronous
    pipeline the hook of batch t is then called once update t has been applied, which is in the middle of batch t+1
    unless the pipeline drained; it may not save or evaluate. Under the other strategies that is where it is anyway.

    Returns:
        The callback.
    """
    vars(callback)[_MARK] = True
    return callback


class _BatchEnd(NamedTuple):
    """The end of a batch.

    Attributes:
        updates: how many are applied before it in a single process.
        first: microbatch after it.
        arguments: of the hooks, behind the trainer and the module.
    """

    updates: int
    first: int
    arguments: tuple[Any, ...]


class BatchEnds(Callback):
    """Keeps the ends of batches until their updates have been applied; in order, and each exactly once.

    It calls the module's own hook, those of callbacks that :func:`after_own_update` marked, and of Lightning's that
    average weights, in the place of the trainer, until :meth:`release`; before those that save.

    Args:
        module: that is trained.
        session: the pipeline.
        trainer: whose callbacks they are.

    Attributes:
        waiting: ends of batches whose hooks are still to be called.
        kinds: of callbacks on any rank.
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
        # A callback may be on some ranks alone; drains must be the same on all.
        self.kinds = {*exchange(session.running().mesh, own)} - {""}

    def release(self) -> None:
        """Give the hooks back."""
        self.waiting.clear()
        for owner in self._called:
            vars(owner).pop(HOOK, None)
        self._called = []

    def meets_gradients(self) -> bool:
        """Whether the pipeline drains for the hooks after this batch.

        It does where they may change weights that the mini-batch is still running at, and where one process has all
        stages: these apply an update one after the other, but the hooks are called once. A drain costs no time there.
        """
        engine, trainer = self._session.running(), self._trainer
        # Not what this rank has: a rank that left a step out would drain alone, for a gradient that is thrown away.
        goes_on = (trainer.fit_loop.epoch_loop.batch_idx + 1) % trainer.accumulate_grad_batches != 0
        return len(engine.parts) > 1 or (_MAY_CHANGE in self.kinds and goes_on and engine.at_newest)

    def check_drain(self) -> None:
        """Refuse a drain by a hook that is called in the middle of another batch: it would meet that batch's update.

        Raises:
            ConfigurationError: one is.
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
        """Call the hooks of earlier batches whose updates have just been applied, in the middle of a later batch."""
        self._is_late = True
        try:
            # The last resort of a drain may come from an evaluation.
            with torch.inference_mode(False), torch.enable_grad():
                self._call_due()
        finally:
            self._is_late = False

    def _call_due(self) -> None:
        while self.waiting and self.waiting[0].updates <= self._session.running().updates.applied:
            end = self.waiting.popleft()
            # Not from the process's generators: how much was drawn there by then depends on when the hook is called,
            # and on whether the stage reads data. All ranks draw the same, for what a hook writes into weights.
            engine = self._session.running()
            draws = drawing_from(self._session.seed, engine.runner.device, "batch end", end.first)
            with draws, private.running_hook(self._module, HOOK):
                for hook in self._hooks:
                    hook(*end.arguments)
            engine.weights.adopt(unseen=True)


def _nothing(*_: Any) -> None:
    """Stand where the trainer calls a hook too early."""
