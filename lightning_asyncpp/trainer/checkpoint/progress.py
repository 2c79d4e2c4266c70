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
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_asyncpp.core.batches.tree import map_tensors
from lightning_asyncpp.core.randomness import set_random_states
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.strategy_parts.loader_identity import IDENTITY, differences, problems_with_place
from lightning_asyncpp.strategy_parts.resumable_loader import (
    ResumableLoader,
    problems_in_mid_epoch,
    problems_with_workers,
)
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
INEXACT = (
    "the rest of the run would not be that of the uninterrupted one. Resume from a checkpoint of an epoch's end, or"
    " accept it: give the strategy inexact_resume=True"
)

WILL_BE_REFUSED = (
    "a checkpoint is written after batch {} of an epoch, and no training will go on from it: {}. Save at the ends of"
    " epochs, or give the strategy inexact_resume=True, with which one goes on as well as it can. To evaluate, or to"
    " begin with its weights, it is good for"
)
_NOT_ACCUMULATED = (
    "the checkpoint does not hold the gradients that were accumulated: save it when an update is due, every"
    " accumulate_grad_batches batches"
)
_ACCEPTED = "inexact_resume=True: the rest of the run is not that of the uninterrupted one"


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

    Args:
        accepts_inexact: whether a resume is wanted that repeats or leaves out batches.

    Attributes:
        validations: their random numbers, which are not the training's.
    """

    def __init__(self, accepts_inexact: bool = False) -> None:
        self._accepts_inexact = accepts_inexact
        self.validations = ValidationRandomness()
        self._loaders: list[ResumableLoader] = []
        self._epoch_of_loaders = -1  # for which they were made: they may be made anew every few epochs
        self._state: Mapping[str, Any] | None = None
        self._loops: Mapping[str, Any] = {}
        self._changes: list[str] = []
        self._draws: Mapping[str, Any] | None = None
        self._at_cut: dict[str, Any] | None = None  # the newest epoch was cut short by the end of the run
        self._has_warned = False

    # -- a checkpoint is written --------------------------------------------------------------------------------------

    def state(self, trainer: Trainer, module: LightningModule, recorded: Mapping[str, Any]) -> dict[str, Any]:
        """What this rank must remember.

        Args:
            trainer: in training, or after it.
            module: its torchmetrics objects.
            recorded: what the strategy keeps of metrics.
        """
        state = self._now(trainer, module, recorded) if self._at_cut is None else self._at_cut
        self._warn_if_refused(trainer, state)
        return state

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

    def _warn_if_refused(self, trainer: Trainer, state: Mapping[str, Any]) -> None:
        """Say once that a checkpoint in the middle of an epoch is none to go on from, while there is time."""
        progress = trainer.fit_loop.epoch_loop.batch_progress
        if self._has_warned or self._accepts_inexact or not progress.current.ready or progress.is_last_batch:
            return
        problems = [_NOT_ACCUMULATED] if state["accumulating"] else []
        for resumable, saved in zip(self._loaders, state["loaders"]):
            problems += problems_in_mid_epoch(resumable.loader, saved)
        if problems:
            self._has_warned = True
            rank_zero_warn(WILL_BE_REFUSED.format(progress.current.ready, "; ".join(dict.fromkeys(problems))))

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

    def resume(self, state: Mapping[str, Any] | None, loops: Mapping[str, Any], changes: Sequence[str]) -> None:
        """Go on from a checkpoint when training starts.

        Args:
            state: of this rank; None: the checkpoint holds none.
            loops: the state of the Trainer's loops in the checkpoint; changed if their epoch goes on.
            changes: what makes it impossible to go on exactly in the middle of an epoch, in words.

        Raises:
            ConfigurationError: the state is damaged.
        """
        if state is not None and not isinstance(state.get("random"), Mapping):
            raise ConfigurationError(
                "the checkpoint is damaged: it holds no random numbers of the training, which would go on with others"
            )
        if state is not None and Outstanding(*state["outstanding"]).rest_of_epoch:
            count_as_unfinished(loops)
        self._state, self._loops, self._changes, self._at_cut = state, loops, list(changes), None
        self._draws = None if state is None else state["random"]
        self.validations.go_on(None if state is None else self._draws_of_validation(state))
        self._loaders = []

    @staticmethod
    def _draws_of_validation(state: Mapping[str, Any]) -> Mapping[str, Any] | None:
        # The very first goes on from the training's generators, which are where they were with the next batch only.
        is_first = state["random_in_validations"] is None and Outstanding(*state["outstanding"]).validation
        states: Mapping[str, Any] | None = state["random" if is_first else "random_in_validations"]
        return states

    @property
    def loaders(self) -> list[Mapping[str, Any]]:
        """What the training loaders say of themselves, as ``loader_identity`` gives it."""
        return [loader.identity for loader in self._loaders]

    @property
    def goes_on(self) -> bool:
        """Whether a training that is about to begin goes on from a checkpoint."""
        return self._state is not None

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
        """The loader that is read instead of ``loader``, from where a checkpoint was if there is one.

        Raises:
            ConfigurationError: it cannot go on in the middle of an epoch, and that was not accepted.
        """
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
            self._check(resumable, state, f"training loader {number}: " if max(number, len(saved) - 1) else "")
            resumable.resume(state, ended=not self._in_mid_epoch)
            resumable.waits = Outstanding(*self.outstanding).epoch_end
        return resumable

    def begin(self, trainer: Trainer, module: LightningModule) -> Mapping[str, Any] | None:
        """Take up metrics, when all that is before training is done; what the strategy kept of them is returned."""
        state = self._state
        if state is None:
            return None
        load_logged_state(trainer, state["logged"], self._in_epoch)
        spent = names_of_spent(state["logged"], self._in_epoch)
        load_metric_states(module, {name: saved for name, saved in state["metrics"].items() if name not in spent})
        self._state = None
        recorded: Mapping[str, Any] = state["recorded"]
        return recorded

    def draw_as_before(self) -> None:
        """Put the random numbers where the checkpoint was, after all that a run draws to begin with.

        Raises:
            ConfigurationError: it does not say where.
        """
        draws, self._draws = self._draws, None
        try:
            if draws is not None:
                set_random_states(draws)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigurationError(
                "the checkpoint is damaged: its random numbers cannot be taken up, and training would go on with others"
                f" ({type(error).__name__}: {error})"
            ) from error

    @property
    def _in_mid_epoch(self) -> bool:
        progress = self._loops["epoch_loop.batch_progress"]
        return bool(progress["current"]["ready"]) and not progress["is_last_batch"]

    @property
    def _in_epoch(self) -> bool:
        """Whether an epoch had begun, and its metrics were not logged yet."""
        epochs = self._loops["epoch_progress"]["current"]
        return bool(epochs["started"] > epochs["completed"])

    def _check(self, resumable: ResumableLoader, state: Mapping[str, Any], which: str) -> None:
        loader, mid_epoch = resumable.loader, self._in_mid_epoch
        problems = [f"{which}{problem}" for problem in problems_with_workers(loader, state)]
        changes = [f"{which}{change}" for change in differences(resumable.identity, state.get(IDENTITY))]
        if mid_epoch:
            problems += self._changes
            if self._state is not None and self._state["accumulating"]:
                problems.append(_NOT_ACCUMULATED)
            own = [*problems_in_mid_epoch(loader, state), *problems_with_place(loader, state)]
            problems += [*(f"{which}{problem}" for problem in own), *changes]
        elif changes:
            rank_zero_info(f"The next epoch is not read as the last one was: {'; '.join(changes)}")
        if not problems:
            return
        if self._accepts_inexact:
            rank_zero_warn(f"{_ACCEPTED}:\n" + "\n".join(f"  - {problem}" for problem in problems))
            return
        after = self._loops["epoch_loop.batch_progress"]["current"]["ready"]
        raise ConfigurationError.from_problems(problems, f"{_at(after)}{INEXACT}", ". ")


def _accumulating(trainer: Trainer) -> bool:
    """Whether batches ran that no update has followed yet."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return bool(progress.current.ready % trainer.accumulate_grad_batches) and not progress.is_last_batch


def _at(batches: int) -> str:
    return f"The checkpoint was written after batch {batches} of an epoch: "
