"""The Trainer's checkpoints of a pipeline: what all stages hold, in one file or sharded, and handed back to each."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from torch.optim import Optimizer
from typing_extensions import override

from lightning_asyncpp.core.checkpoint.gathering import gather_by_rank
from lightning_asyncpp.core.checkpoint.state import (
    PIPELINE,
    gather_model_state,
    gather_named,
    gather_optimizer_state,
    gather_pipeline_state,
    load_optimizer_state,
    load_pipeline_state,
    rank_to_follow,
    stage_model_state,
    stage_optimizer_state,
    stage_pipeline_state,
)
from lightning_asyncpp.core.cut.tied_state import check_copies
from lightning_asyncpp.core.ranks.agreement import agree_on_error
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.strategy_parts.mixin import PipelineStrategyMixin
from lightning_asyncpp.trainer.checkpoint.progress import PROGRESS, Progress
from lightning_asyncpp.trainer.logging.step_metrics import StepMetrics

_CURRENT = "current_model_state"  # of Lightning's callbacks that average weights, whose averages are in "state_dict"
_PARTS = ("state_dict", _CURRENT, "optimizer_states")
_WEIGHTS = frozenset(("state_dict", _CURRENT))


class PipelineCheckpoints(PipelineStrategyMixin, DDPStrategy):
    """Saves the whole run, and loads this stage's part of one.

    Attributes:
        progress: what goes on with a run beside its weights.
        step_metrics: what its steps logged.
    """

    progress: Progress
    step_metrics: StepMetrics

    @property
    @abstractmethod
    def _module(self) -> LightningModule:
        """The user's module."""

    @abstractmethod
    def drain(self) -> None:
        """Finish what is in flight and apply every update."""

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def full_state_dict(self) -> dict[str, Any]:
        """The whole module's ``state_dict`` on rank 0, this stage's part elsewhere; a collective that drains first."""
        return self._state_dict(gather_model_state)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        state = self._state_dict(stage_model_state if self.checkpoints.sharded else gather_model_state)
        self.step_metrics.log_before_save()
        return state

    def _state_dict(self, of_stages: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        self.session.running()
        self.drain()
        return of_stages(self.session, self._module.state_dict())

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self.session.running()
        return (stage_optimizer_state if self.checkpoints.sharded else gather_optimizer_state)(self.session)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write the whole run: one file on rank 0, or every stage its part of a folder; a collective call.

        Raises:
            StorageError: it cannot be written; what had its name is intact.
        """
        is_training = self.session.optimizer is not None and "optimizer_states" in checkpoint  # else weights only
        # Only loaders that keep a state take one up; the pipeline's entry has what theirs are.
        checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).pop("combined_loader", None)
        mesh, sharded = self.session.running().mesh, self.checkpoints.sharded
        parts = {name: checkpoint.pop(name) for name in _PARTS if name in checkpoint} if sharded else {}
        if not sharded and self._averages_weights() and _CURRENT in checkpoint:  # of this stage, by the callback
            checkpoint["state_dict"] = gather_named(self.session, checkpoint["state_dict"])
        of_ranks = {PROGRESS: gather_by_rank(mesh, self.progress.state(self._module.trainer)) if is_training else []}
        self.checkpoints.settle()
        if sharded:
            if is_training:
                parts[PIPELINE] = {**stage_pipeline_state(self.session), **(of_ranks if self.is_global_zero else {})}
            self.checkpoints.save_folder(filepath, parts, checkpoint)
            return
        if is_training:
            checkpoint[PIPELINE] = {**gather_pipeline_state(self.session), **of_ranks}
        self.checkpoints.save_file(checkpoint, filepath, self.checkpoint_io, storage_options)

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
            for name in _WEIGHTS & content.keys():
                content[name] = self._of_this_stage(content[name])  # the callback loads all that it finds
        return content

    def _averages_weights(self) -> bool:
        """Whether a callback of Lightning averages weights, and will take them up from a checkpoint."""
        callbacks = self._module.trainer.callbacks  # type: ignore[attr-defined]
        return self.session.optimizer is not None and any(isinstance(c, WeightAveraging) for c in callbacks)

    def _entry_of_weights(self, content: Mapping[str, Any]) -> str:
        """Where the weights are that are trained; an averaging callback puts others into their place."""
        return _CURRENT if self._averages_weights() and _CURRENT in content else "state_dict"

    def _of_this_stage(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Without the entries of layers, and of averages of them, that other stages hold."""
        gone = self.session.whole_model.pruned.names
        return {name: value for name, value in state.items() if name not in gone}

    def _resume_progress(self, content: Mapping[str, Any]) -> None:
        state = content.get(PIPELINE)
        if state is None:
            return
        mesh, replicas = self.session.running().mesh, state["data_parallel_size"]
        of_ranks = state[PROGRESS]  # one, if all stages were in one process
        own = of_ranks[rank_to_follow(mesh, state) if len(of_ranks) > 1 else 0]
        self.progress.resume(own, content["loops"]["fit_loop"], same_replicas=replicas == mesh.num_replicas)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self.session.check_drain()
        weights = checkpoint[self._entry_of_weights(checkpoint)]
        error: Exception | None = None
        try:
            check_copies(weights, self.session.whole_model.same)
            self.session.whole_model.pruned.load(self._module, weights, strict)
        except (RuntimeError, ConfigurationError) as caught:
            error = caught
        engine = self.session.running()
        agree_on_error(engine.mesh, error)
        if self.session.optimizer is None:
            engine.weights.restore(engine.weights.newest, None)
        else:
            load_pipeline_state(self.session, checkpoint.get(PIPELINE))

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        load_optimizer_state(self.session, checkpoint["optimizer_states"][0])
