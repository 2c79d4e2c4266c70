"""The Trainer's checkpoints of a pipeline: what all stages hold, in one file or sharded, and handed back to each."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from torch.optim import Optimizer
from typing_extensions import override

from lightning_asyncpp.core.checkpoint.gathering import gather
from lightning_asyncpp.core.checkpoint.state import (
    PIPELINE,
    gathered,
    load_model_state,
    load_pipeline_state,
    rank_to_follow,
    stage_model_state,
    stage_pipeline_state,
)
from lightning_asyncpp.strategy_parts.mixin import PipelineStrategyMixin
from lightning_asyncpp.trainer.checkpoint.progress import PROGRESS, Progress

_CURRENT = "current_model_state"  # of Lightning's callbacks that average weights, whose averages are in "state_dict"
_OF_STAGES = ("state_dict", _CURRENT, "optimizer_states", PIPELINE)


class PipelineCheckpoints(PipelineStrategyMixin, DDPStrategy):
    """Saves the whole run, and loads this stage's part of one.

    Attributes:
        progress: what goes on with a run beside its weights.
    """

    progress: Progress

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
        """The whole module's ``state_dict`` on rank 0, this stage's part on others; a collective that drains first."""
        return gathered(self.session, self._stage_state())

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self.checkpoints.collected(self._stage_state())

    def _stage_state(self) -> dict[str, Any]:
        self.session.running()
        self.drain()
        return stage_model_state(self.session, self._module.state_dict())

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self.session.running()
        return self.checkpoints.collected(self.session.stage_optimizer.state_dict())

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write the whole run: one file on rank 0, or every stage its part of a folder; a collective call.

        Raises:
            StorageError: it cannot be written; what had its name is intact.
        """
        # Only loaders that keep a state take one up; the pipeline's entry has what theirs are.
        checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).pop("combined_loader", None)
        if _CURRENT in checkpoint and self._averages_weights():  # the averages are of this stage, by the callback
            checkpoint["state_dict"] = self.checkpoints.collected(checkpoint["state_dict"])
        if self.session.optimizer is not None and "optimizer_states" in checkpoint:  # else weights only
            mesh = self.session.running().mesh
            of_ranks = gather(mesh, self.progress.state(self._module.trainer), range(mesh.world_size))
            state = self.checkpoints.collected(stage_pipeline_state(self.session))
            checkpoint[PIPELINE] = {**state, PROGRESS: of_ranks} if self.is_global_zero else state
        if not self.is_global_zero:
            checkpoint = {name: checkpoint[name] for name in _OF_STAGES if name in checkpoint}
        files = self.checkpoint_io
        self.checkpoints.save(filepath, checkpoint, lambda it: files.save_checkpoint(it, filepath, storage_options))

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
        load_model_state(self.session, self._module, checkpoint[self._entry_of_weights(checkpoint)], strict)
        if self.session.optimizer is not None:
            load_pipeline_state(self.session, checkpoint.get(PIPELINE))

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self.session.stage_optimizer.load_state_dict(checkpoint["optimizer_states"][0])
