"""How far a training has come beside its weights and loops: data, random numbers, metrics, the rest of a batch.

Every rank has its own: a checkpoint holds them by rank, and after a change of the stages a rank takes up those of the
last stage of its replica, which is where the loss was computed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import lightning as L
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_asyncpp.core.batches.tree import map_tensors
from lightning_asyncpp.core.randomness import set_random_states
from lightning_asyncpp.strategy_parts.resumable_loader import ResumableLoader, inexact_because
from lightning_asyncpp.strategy_parts.shuffling import shuffle_by_epoch
from lightning_asyncpp.strategy_parts.stage_loader import PlaceholderLoader
from lightning_asyncpp.trainer import private
from lightning_asyncpp.trainer.checkpoint.epoch_metrics import (
    load_logged_state,
    load_metric_states,
    logged_state,
    metric_states,
    names_of_spent,
)
from lightning_asyncpp.trainer.checkpoint.validation_randomness import ValidationRandomness

PROGRESS = "progress"
"""Entry of a checkpoint's state of a strategy: by rank, what :meth:`Progress.state` returned."""
_INEXACT = (
    "the checkpoint was written after batch {} of an epoch, and its rest is not read as without the interruption: {}."
    " Batches may be seen twice and others not at all; the next epoch is whole again. Exact there are checkpoints of an"
    " epoch's end, and loaders with a state, such as torchdata's StatefulDataLoader and litdata's StreamingDataLoader"
)
_ACCUMULATED = "the gradients that had been accumulated for the next update are not in it"


class Outstanding(NamedTuple):
    """What was still to come of a batch after which a checkpoint was written.

    Attributes:
        batch_end: a learning rate that waits for a metric, and whatever else follows a batch.
        validation: a validation that is due.
        epoch_end: the end of the epoch.
        rest_of_epoch: batches of an epoch that the end of the run (``max_steps``, a stop) has cut short. Lightning
            counts it as any other epoch; a run that goes on goes on in it.
    """

    batch_end: bool = False
    validation: bool = False
    epoch_end: bool = False
    rest_of_epoch: bool = False

    @classmethod
    def of(cls, trainer: L.Trainer) -> Outstanding:
        """What is still to come for a trainer that writes a checkpoint now."""
        progress = trainer.fit_loop.epoch_loop.batch_progress
        if trainer.state.fn == TrainerFn.FITTING and trainer.validating:
            return cls(epoch_end=progress.is_last_batch)
        counts, epochs = (loop.state_dict()["total"] for loop in (progress, trainer.fit_loop.epoch_progress))
        # The last batch of an epoch may have been skipped, and is never completed.
        is_over = counts["completed"] >= counts["processed"] or epochs["processed"] >= epochs["ready"]
        if is_over or not trainer.training:
            return cls()
        return cls(True, private.validation_is_due(trainer), progress.is_last_batch)


def is_cut_short(trainer: L.Trainer) -> bool:
    """Whether the run ends with an epoch of which batches are left; to be asked when that epoch ends."""
    loop = trainer.fit_loop.epoch_loop
    has_all_steps = -1 < loop.max_steps <= loop.global_step
    return not loop.batch_progress.is_last_batch and (has_all_steps or trainer.should_stop)


def count_as_unfinished(fit_loop: Mapping[str, Any]) -> None:
    """Let a run go on in the epoch that was the last one of another.

    Args:
        fit_loop: the state of the Trainer's loop in the checkpoint, which is changed.
    """
    for counts in (fit_loop["epoch_progress"]["total"], fit_loop["epoch_progress"]["current"]):
        counts["processed"] = min(counts["processed"], counts["started"] - 1)
        counts["completed"] = min(counts["completed"], counts["processed"])


class Progress:
    """The progress of one rank.

    Attributes:
        validations: their random numbers, which are not the training's.
    """

    def __init__(self) -> None:
        self.validations = ValidationRandomness()
        self._loaders: list[ResumableLoader] = []
        self._epoch_of_loaders = -1  # for which they were made: they may be made anew every few epochs
        self._state: Mapping[str, Any] | None = None
        self._loops: Mapping[str, Any] = {}
        self._same_replicas, self._has_warned = True, False
        self._draws: Mapping[str, Any] | None = None
        self._at_cut: dict[str, Any] | None = None  # the newest epoch was cut short by the end of the run

    # -- a checkpoint is written --------------------------------------------------------------------------------------

    def state(self, trainer: Trainer, module: LightningModule, recorded: Mapping[str, Any]) -> dict[str, Any]:
        """What this rank must remember.

        Args:
            trainer: in training, or after it.
            module: its torchmetrics objects.
            recorded: what the strategy keeps of metrics.
        """
        return self._now(trainer, module, recorded) if self._at_cut is None else self._at_cut

    def _now(self, trainer: Trainer, module: LightningModule, recorded: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "outstanding": list(Outstanding.of(trainer)),
            "accumulating": _accumulating(trainer),
            "random": self.validations.of_training() if self._draws is None else self._draws,
            "random_in_validations": self.validations.of_validations(),
            "loaders": [loader.state_dict() for loader in self._loaders],
            "logged": logged_state(trainer),
            "metrics": metric_states(module),
            "recorded": recorded,
        }

    def begin_epoch(self) -> None:
        """A new epoch begins: the run goes on."""
        self._at_cut = None

    def remember_if_cut_short(self, trainer: Trainer, module: LightningModule, recorded: Mapping[str, Any]) -> None:
        """Call this first when an epoch ends: one that is cut short goes on in a run that is resumed.

        What hooks of this end do (metrics begin anew, random numbers are drawn) is nothing that the rest of it sees.
        """
        if is_cut_short(trainer):
            state = self._now(trainer, module, recorded)
            outstanding = list(Outstanding(rest_of_epoch=True))
            self._at_cut = map_tensors(lambda tensor: tensor.clone(), {**state, "outstanding": outstanding})

    # -- a run goes on ------------------------------------------------------------------------------------------------

    def resume(self, state: Mapping[str, Any], loops: Mapping[str, Any], same_replicas: bool) -> None:
        """Go on from a checkpoint when training starts.

        Args:
            state: of this rank.
            loops: the state of the Trainer's loops in the checkpoint; changed if their epoch goes on.
            same_replicas: whether as many replicas wrote it: others read other parts of the data.
        """
        if Outstanding(*state["outstanding"]).rest_of_epoch:
            count_as_unfinished(loops)
        self._state, self._loops, self._same_replicas, self._at_cut = state, loops, same_replicas, None
        self._draws = state["random"]
        self.validations.go_on(self._draws_of_validation(state))
        self._loaders = []

    @staticmethod
    def _draws_of_validation(state: Mapping[str, Any]) -> Mapping[str, Any] | None:
        # The very first goes on from the training's generators, which are where they were with the next batch only.
        is_first = state["random_in_validations"] is None and Outstanding(*state["outstanding"]).validation
        states: Mapping[str, Any] | None = state["random" if is_first else "random_in_validations"]
        return states

    @property
    def outstanding(self) -> Sequence[bool]:
        """What was still to come of the batch after which the checkpoint was written, as :class:`Outstanding`."""
        return () if self._state is None else self._state["outstanding"]

    def end_epoch(self) -> None:
        """Let loaders be read again that had nothing left for the end of an epoch in which the run was resumed."""
        for loader in self._loaders:
            loader.waits = False

    def forget(self) -> None:
        """Begin a run anew: the loaders are those of another one."""
        self._state, self._draws, self._loaders, self._at_cut = None, None, [], None
        self.validations.go_on(None)

    def training_loader(self, loader: Any, trainer: Trainer) -> Any:
        """The loader that is read instead of ``loader``, from where a checkpoint was if there is one."""
        if isinstance(loader, PlaceholderLoader):
            # It says the same of itself as where it is read.
            loader.loader = self.training_loader(loader.loader, trainer)
            return loader
        shuffle_by_epoch(loader)
        if trainer.current_epoch != self._epoch_of_loaders:
            self._loaders, self._epoch_of_loaders = [], trainer.current_epoch
        number = len(self._loaders)
        ahead = functools.partial(private.batches_ahead, trainer)
        resumable = ResumableLoader(loader, ahead)
        self._loaders.append(resumable)
        if self._state is not None:
            saved = self._state["loaders"]
            state = saved[number] if number < len(saved) else {"batches": 0}
            if self._in_mid_epoch:
                self._warn_if_inexact(loader, state)
            resumable.resume(state, ended=not self._in_mid_epoch)
            resumable.waits = Outstanding(*self.outstanding).epoch_end
        return resumable

    def begin(self, trainer: Trainer, module: LightningModule) -> Mapping[str, Any] | None:
        """Take up metrics, when all that is before training is done; what the strategy kept of them is returned."""
        state = self._state
        if state is None:
            return None
        private.count_step_as_saved(trainer)
        load_logged_state(trainer, state["logged"], self._in_epoch)
        spent = names_of_spent(state["logged"], self._in_epoch)
        load_metric_states(module, {name: saved for name, saved in state["metrics"].items() if name not in spent})
        self._state = None
        recorded: Mapping[str, Any] = state["recorded"]
        return recorded

    def draw_as_before(self) -> None:
        """Put the random numbers where the checkpoint was, after all that a run draws to begin with."""
        draws, self._draws = self._draws, None
        if draws is not None:
            set_random_states(draws)

    @property
    def _in_mid_epoch(self) -> bool:
        progress = self._loops["epoch_loop.batch_progress"]
        return bool(progress["current"]["ready"]) and not progress["is_last_batch"]

    @property
    def _in_epoch(self) -> bool:
        """Whether an epoch had begun, and its metrics were not logged yet."""
        epochs = self._loops["epoch_progress"]["current"]
        return bool(epochs["started"] > epochs["completed"])

    def _warn_if_inexact(self, loader: Any, state: Mapping[str, Any]) -> None:
        """Say once why the rest of the epoch is not exactly that of the uninterrupted run."""
        assert self._state is not None
        reasons = [] if self._same_replicas else ["data_parallel_size is another one"]
        reasons += [_ACCUMULATED] if self._state["accumulating"] else []
        reasons += [reason] if (reason := inexact_because(loader, state)) else []
        if reasons and not self._has_warned:
            self._has_warned = True
            after = self._loops["epoch_loop.batch_progress"]["current"]["ready"]
            rank_zero_warn(_INEXACT.format(after, "; ".join(reasons)))


def _accumulating(trainer: Trainer) -> bool:
    """Whether batches ran that no update has followed yet."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return bool(progress.current.ready % trainer.accumulate_grad_batches) and not progress.is_last_batch
