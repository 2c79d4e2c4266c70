"""What a module does at the end of a batch: after the batch's own update, and before a checkpoint is saved.

A checkpoint that is saved there has what the hook did. In an asynchronous pipeline the update of batch t is applied in
or after batch t+1, or at the end of batch t where the pipeline drains there. A hook that changes weights, as a
projection does, would be called before or after it, whichever it happens to be, and so would make the training depend
on how often the run validates. Called between update t and update t+1 it does to W_{t+1} what it does in a single
process.

Of batches that share update t (gradient accumulation) only the last one's hook has to wait for it. Those before come
after update t-1, and so change W_t, which update t is then applied to. Mini-batch t runs at W_{t-1}, so none of its
gradients sees the change. Without delay, and in the mini-batches before it sets in, it runs at W_t itself: the batches
after the hook see the change and those before it do not, so the pipeline drains in between. So it does with the least
staleness, under which the later micro-batches of mini-batch t run at W_t.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import lightning as L
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import Checkpoint, WeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from lightning_asyncpp.core.randomness import derive, drawing_from
from lightning_asyncpp.core.ranks.agreement import exchange
from lightning_asyncpp.core.session import PipelineSession
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.trainer import private
from lightning_asyncpp.trainer.hooks.module_hooks import Replacement
from lightning_asyncpp.trainer.logging.step_metrics import StepMetrics

C = TypeVar("C", bound=Callback)
Hook = Callable[[L.Trainer, LightningModule, Any, Any, int], None]
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


class _BatchEnd(NamedTuple):
    """The end of a batch.

    Attributes:
        updates: how many are applied before it in a single process.
        first: micro-batch after it.
        weight: of the batch, for what is logged.
        outputs, batch, batch_idx: what the hook is called with.
    """

    updates: int
    first: int
    weight: float
    outputs: Any
    batch: Any
    batch_idx: int


class BatchEnds(ModuleFirst):
    """Keeps the ends of batches until their updates have been applied; in order, and each exactly once.

    Args:
        module: whose hook it is.
        session: the pipeline.
        step_metrics: takes what the hook logs.
    """

    def __init__(self, module: LightningModule, session: PipelineSession, step_metrics: StepMetrics) -> None:
        super().__init__(module)
        self._session, self._step_metrics = session, step_metrics
        self._trainer: L.Trainer | None = None
        self._waiting: deque[_BatchEnd] = deque()
        self._is_late = False
        self._hooks: set[str] = set()  # kinds of hooks on any rank

    @override
    def install(self, trainer: L.Trainer) -> None:
        """Take the place in front of the callbacks that save, if there are hooks to call; a collective call."""
        self._trainer = trainer
        super().install(trainer)
        reads_only = all(isinstance(taken.owner, WeightAveraging) for taken in self._taken)
        engine = self._session.running()
        # A callback may be on some ranks alone; drains and what is logged must be the same on all.
        own = "" if not self._taken else _READS if reads_only else _MAY_CHANGE
        self._hooks = {*exchange(engine.mesh, own)} - {""}
        self._step_metrics.holds = bool(self._hooks) and engine.settings.delay > 0

    @override
    def release(self) -> None:
        self._waiting.clear()
        super().release()

    def meets_gradients(self) -> bool:
        """Whether the pipeline drains for the hooks after this batch.

        It does where they may change weights that the mini-batch is still running at, and where one process has all
        stages: these apply an update one after the other, but the hooks are called once. A drain costs no time there.
        """
        engine = self._session.running()
        if len(engine.parts) > 1:
            return bool(self._hooks)
        return _MAY_CHANGE in self._hooks and engine.accumulating and engine.at_newest

    def check_drain(self) -> None:
        """Refuse a drain by a hook that is called in the middle of another batch: it would meet that batch's update.

        Raises:
            ConfigurationError: one is.
        """
        if self._is_late:
            raise ConfigurationError(
                f"{HOOK} of the LightningModule saves a checkpoint, gathers weights or evaluates: it runs between two"
                " updates, in the middle of the next batch; do that in a callback's on_train_batch_end (ModelCheckpoint"
                " saves every_n_train_steps), or in on_train_epoch_end"
            )

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        engine, weight = self._session.running(), self._step_metrics.batch_weight
        self._waiting.append(_BatchEnd(engine.mini_batch, engine.next_forward, weight, outputs, batch, batch_idx))
        self._call_due()

    def call_late(self) -> None:
        """Call the hooks of earlier batches whose updates have just been applied."""
        if self._is_due:
            # The last resort of a drain may come from an evaluation.
            with torch.inference_mode(False), torch.enable_grad(), self._late():
                self._call_due()

    @property
    def _is_due(self) -> bool:
        return bool(self._waiting) and self._waiting[0].updates <= self._session.running().updates.applied

    def _call_due(self) -> None:
        assert self._trainer is not None
        while self._is_due:
            end = self._waiting.popleft()
            engine = self._session.running()
            schedule, parts = engine.schedule, engine.settings.micro_batches
            is_newest = engine.mini_batch == end.updates
            was_late = end.updates > engine.undelayed and schedule.applies_after_next_batch(end.updates - 1, parts)
            with (
                self._session.weights_may_change(),
                self._step_metrics.of_batch(end.weight, held=is_newest and was_late),
                drawing_from(self._seed(end.first)),
                private.running_hook(self._module, HOOK),
            ):
                self._call(self._trainer, end.outputs, end.batch, end.batch_idx)

    def _seed(self, k: int) -> int:
        # Not from the process's generators: how much was drawn there by then depends on when the hook is called, and on
        # whether the stage reads data. All ranks draw the same, for what a hook writes into weights.
        return derive(self._session.seed, "batch end", k)

    @contextmanager
    def _late(self) -> Iterator[None]:
        """Note that the hooks run in the middle of a later batch, where nothing can drain."""
        self._is_late = True
        try:
            yield
        finally:
            self._is_late = False


def _comes_after_own_update(callback: Callback) -> bool:
    return isinstance(callback, WeightAveraging) or bool(vars(callback).get(_MARK))
