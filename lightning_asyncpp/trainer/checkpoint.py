"""Checkpoints of a pipeline under the Trainer, as one file or sharded, and resuming from them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from torch.optim import Optimizer
from typing_extensions import override

from lightning_asyncpp.core.checkpoint import (
    PIPELINE,
    gather,
    gathered,
    load_model_state,
    load_pipeline_state,
    rank_to_follow,
    stage_model_state,
    stage_pipeline_state,
)
from lightning_asyncpp.core.cut.averages import averages_in
from lightning_asyncpp.core.randomness import random_states, set_random_states
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.strategy_parts.mixin import PipelineStrategyMixin
from lightning_asyncpp.strategy_parts.resumable_loader import ResumableLoader, warn_if_inexact
from lightning_asyncpp.strategy_parts.stage_loader import PlaceholderLoader, shuffle_by_epoch
from lightning_asyncpp.trainer import private

_LOADERS = "combined_loader"  # entry of the fit loop's state with the states of training loaders
_CURRENT = "current_model_state"  # entry of the trained weights if Lightning's callback saves averages as "state_dict"
PROGRESS = "progress"
"""Entry of the strategy's state in a checkpoint: the :meth:`Progress.state` of each rank."""
_OF_STAGES = ("state_dict", _CURRENT, "optimizer_states", PIPELINE)


class Progress:
    """Part of a rank's progress that Lightning does not save: position in the data, random states, newest metrics.

    A checkpoint has the progress of every rank. If the number of stages or replicas has changed, a rank loads the
    progress of the last stage, which computed the loss, of its replica or, if that is new, of the last replica.
    """

    def __init__(self) -> None:
        self._loaders: list[ResumableLoader] = []
        self._loaders_before: list[ResumableLoader] = []  # made before the checkpoint was read
        self._epoch_of_loaders = -1  # epoch in which _loaders were made; Lightning may make new ones every few epochs
        self._state: Mapping[str, Any] | None = None  # from a checkpoint, until training starts
        self._loops: Mapping[str, Any] = {}
        self._same_replicas, self._has_warned = True, False
        self._training: Mapping[str, Any] | None = None  # random states of the training, while a validation runs

    def state(self, trainer: Trainer) -> dict[str, Any]:
        """Return the state that this rank saves, with the newest metrics, since a learning rate may depend on one."""
        draws = self._training or (random_states() if self._state is None else self._state["random"])
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        return {"random": draws, "loaders": [loader.state_dict() for loader in self._loaders], "metrics": metrics}

    @contextmanager
    def validating(self) -> Iterator[None]:
        """Run a validation, and restore the random states of the training at the end.

        Without this, data that is shuffled or augmented with the process's generators would depend on when validations
        run. Stages would also draw different numbers afterwards, since only some run the whole validation step.
        """
        self._training = random_states()
        try:
            yield
        finally:
            set_random_states(self._training)
            self._training = None

    def resume(self, state: Mapping[str, Any], loops: Mapping[str, Any], same_replicas: bool) -> None:
        """Keep the state of a checkpoint until training starts and loads it.

        Args:
            state: state of this rank.
            loops: state of the Trainer's loops in the checkpoint.
            same_replicas: whether the checkpoint was written with the same number of replicas. With another number,
                each replica reads another part of the data.
        """
        self._state, self._loops, self._same_replicas = state, loops, same_replicas
        self._loaders_before, self._loaders = self._loaders, []

    def resume_loaders(self, trainer: Trainer) -> None:
        """Resume loaders that were made before the checkpoint was read; Lightning loads no state into them.

        There are such loaders if ``configure_optimizers`` reads ``trainer.estimated_stepping_batches``.
        """
        if self._state is None or not self._loaders_before:
            return
        self._loaders, self._loaders_before = self._loaders_before, []
        self._epoch_of_loaders = trainer.current_epoch
        for number, loader in enumerate(self._loaders):
            self._resume_loader(loader, number, trainer)
        private.read_again(trainer)

    def start_training(self, trainer: Trainer) -> None:
        """Restore the checkpoint's random states and metrics; call it after the set-up, which draws random numbers."""
        state, self._state = self._state, None
        if state is not None:
            set_random_states(state["random"])
            trainer.callback_metrics.update({name: torch.tensor(value) for name, value in state["metrics"].items()})

    def forget(self) -> None:
        """Drop the state and the loaders of the previous run."""
        self._state, self._loaders, self._loaders_before = None, [], []

    def training_loader(self, loader: Any, trainer: Trainer) -> Any:
        """Wrap a training loader in a resumable one, at the checkpoint's position if there is a checkpoint."""
        if isinstance(loader, PlaceholderLoader):
            # A placeholder loader gives middle stages the length and attributes of the loader that other stages read.
            loader.loader = self.training_loader(loader.loader, trainer)
            return loader
        shuffle_by_epoch(loader)
        if trainer.current_epoch != self._epoch_of_loaders:
            self._loaders, self._epoch_of_loaders = [], trainer.current_epoch
        number = len(self._loaders)
        resumable = ResumableLoader(loader, partial(private.batches_ahead, trainer))
        self._loaders.append(resumable)
        if self._state is not None:
            self._resume_loader(resumable, number, trainer)
        return resumable

    def _resume_loader(self, resumable: ResumableLoader, number: int, trainer: Trainer) -> None:
        """Resume a loader at the position that the checkpoint has for loader number ``number``."""
        assert self._state is not None
        _go_on_after_epoch(trainer)
        saved = self._state["loaders"]
        state = saved[number] if number < len(saved) else {"batches": 0}
        if self._in_mid_epoch and not self._has_warned:
            reasons = [] if self._same_replicas else ["data_parallel_size has changed"]
            self._has_warned = warn_if_inexact(resumable.loader, state, reasons)
        resumable.resume(state, ended=not self._in_mid_epoch)

    @property
    def _in_mid_epoch(self) -> bool:
        progress = self._loops["epoch_loop.batch_progress"]
        return bool(progress["current"]["ready"]) and not progress["is_last_batch"]


class PipelineCheckpoints(PipelineStrategyMixin, DDPStrategy):
    """Strategy that saves the whole run and loads this stage's part of a checkpoint.

    Attributes:
        progress: progress of this rank in the run.
    """

    progress: Progress

    @property
    @abstractmethod
    def _module(self) -> LightningModule:
        """User's module."""

    @abstractmethod
    def drain(self) -> None:
        """Finish all microbatches in flight and apply all outstanding updates."""

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def _started_others(self) -> bool:
        """Whether this process is not a rank, but forks or spawns the ranks."""
        return self.session.mesh is None and self.start_method != "popen"

    def full_state_dict(self) -> dict[str, Any]:
        """Drain (apply all outstanding updates), and return a ``state_dict``; a collective call.

        On rank 0 the result covers the whole module; on other ranks, only their stage. In the process that forked or
        spawned the ranks, it covers the whole module, which has loaded the trained weights.
        """
        if self._started_others:
            return dict(self._module.state_dict())
        return gathered(self.session, self._stage_state())

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._started_others:
            raise ConfigurationError(
                f"start_method={self.start_method!r}: this process only started the ranks. It has the trained weights,"
                " but neither optimizer nor progress. Let a ModelCheckpoint save during the training; to save only the"
                " weights, use torch.save(module.state_dict(), path)"
            )
        return self.checkpoints.collected(self._stage_state())

    def _stage_state(self) -> dict[str, Any]:
        self.session.running()
        self.drain()
        self.session.share_buffers()
        return stage_model_state(self.session, self._module.state_dict())

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self.session.running()
        return self.checkpoints.collected(self.session.stage_optimizer.state_dict())

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write the whole run as one file on rank 0, or as a folder with a part of each stage; a collective call.

        Raises:
            StorageError: the checkpoint cannot be written; an earlier one of the same kind (file or folder) at this
                path is intact, or the complete new one has replaced it.
        """
        self._write_loaders_for_lightning(checkpoint)
        if _CURRENT in checkpoint and self._averages_weights():  # the callback saved the averages of this stage
            own = self.session.whole_model.pruned.without_removed(checkpoint["state_dict"])
            checkpoint["state_dict"] = self.checkpoints.collected(own)
        if self.session.optimizer is not None and "optimizer_states" in checkpoint:  # not weights only
            mesh = self.session.running().mesh
            of_ranks = gather(mesh, self.progress.state(self._module.trainer), range(mesh.world_size))
            state = self.checkpoints.collected(stage_pipeline_state(self.session))
            checkpoint[PIPELINE] = {**state, PROGRESS: of_ranks} if self.is_global_zero else state
        if not self.is_global_zero:
            checkpoint = {name: checkpoint[name] for name in _OF_STAGES if name in checkpoint}
        files = self.checkpoint_io
        self.checkpoints.save(filepath, checkpoint, lambda it: files.save_checkpoint(it, filepath, storage_options))

    def _write_loaders_for_lightning(self, checkpoint: dict[str, Any]) -> None:
        """Keep in Lightning's entry what a plain Trainer can read: the loaders' own states, with a single replica.

        The pipeline's entry has the loaders of all ranks.
        """
        fit_loop = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        states = fit_loop.pop(_LOADERS, ())
        if self.is_global_zero and self.session.running().mesh.num_replicas == 1:
            own = [state.get("loader") for state in states]  # None: without a state, or before the first batch
            fit_loop[_LOADERS] = [state for state in own if state is not None]

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            self.checkpoints.remove(partial(self.checkpoint_io.remove_checkpoint, filepath))

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self.checkpoints.settle()
        content = super().load_checkpoint(checkpoint_path, weights_only)
        if self.session.optimizer is not None:
            self._resume_progress(content)
        if self._averages_weights():
            for name in {"state_dict", _CURRENT} & content.keys():
                # The callback would load the entries of all stages.
                content[name] = self.session.whole_model.pruned.without_removed(content[name])
        return content

    def _averages_weights(self) -> bool:
        """Return whether a callback of Lightning averages weights and loads the averages from a checkpoint."""
        callbacks = self._module.trainer.callbacks  # type: ignore[attr-defined]
        return any(averages_in(callback for callback in callbacks if isinstance(callback, WeightAveraging)))

    def _entry_of_weights(self, content: Mapping[str, Any]) -> str:
        """Return the name of the entry with the trained weights; their usual entry may have averages of weights."""
        return _CURRENT if self._averages_weights() and _CURRENT in content else "state_dict"

    def _resume_progress(self, content: Mapping[str, Any]) -> None:
        state = content.get(PIPELINE)
        if state is None:
            return
        content["loops"]["fit_loop"]["state_dict"].pop(_LOADERS, None)
        mesh, replicas = self.session.running().mesh, state["data_parallel_size"]
        of_ranks = state[PROGRESS]  # one entry if all stages were in one process
        own = of_ranks[rank_to_follow(mesh, state) if len(of_ranks) > 1 else 0]
        self.progress.resume(own, content["loops"]["fit_loop"], same_replicas=replicas == mesh.num_replicas)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self.session.check_drain()
        load_model_state(self.session, self._module, checkpoint[self._entry_of_weights(checkpoint)], strict)
        if self.session.optimizer is not None:
            load_pipeline_state(self.session, checkpoint.get(PIPELINE))

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if checkpoint["optimizer_states"]:  # none after an evaluation alone
            self.session.stage_optimizer.load_state_dict(checkpoint["optimizer_states"][0])
        self.progress.resume_loaders(self._module.trainer)  # the loops' state was restored before


def _go_on_after_epoch(trainer: Trainer) -> None:
    """Begin with the next epoch if the checkpoint was written at the end of an epoch.

    Lightning would run the end of that epoch a second time. Call this after the loops' state was restored and before
    any loop runs.
    """
    epochs = trainer.fit_loop.epoch_progress
    counts = epochs.state_dict()["total"]
    if counts["ready"] == counts["processed"] > 0:
        if counts["completed"] < counts["processed"]:
            epochs.increment_completed()
        trainer.fit_loop.epoch_loop.restarting = False
