"""The Trainer's checkpoints of a pipeline: gathered from all stages on rank 0, and handed back to each."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_asyncpp.pipeline.agreement import agree_on_error
from lightning_asyncpp.pipeline.checkpoint_origin import FABRIC, PIPELINE, TRAINER, origin_of
from lightning_asyncpp.pipeline.errors import ConfigurationError
from lightning_asyncpp.pipeline.session import PipelineSession
from lightning_asyncpp.pipeline.stage import OtherStage
from lightning_asyncpp.pipeline.state import (
    gather_model_state,
    gather_optimizer_state,
    load_pipeline_state,
    own_optimizer_state,
    pipeline_state,
    to_device,
)
from lightning_asyncpp.pipeline.tied_state import check_copies


class TrainerCheckpoints(Strategy):
    """Lets a Trainer read its own checkpoints alone; comes before the strategy that it is mixed into."""

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a file that a Trainer wrote.

        Raises:
            ConfigurationError: something else wrote it; with what reads it.
        """
        content = super().load_checkpoint(checkpoint_path, weights_only)
        origin = origin_of(content)
        if origin.writer == TRAINER:
            return content
        weights = "the entry of the model" if origin.writer == FABRIC else "them"
        raise ConfigurationError(
            f"ckpt_path={str(checkpoint_path)!r} {origin.description}. The Trainer goes on from its own checkpoints; to"
            f" begin with weights from elsewhere, load {weights} into self.model (load_state_dict) before training, and"
            " leave ckpt_path out"
        )


class PipelineCheckpoints(TrainerCheckpoints):
    """Saves the whole run, and loads this stage's part of one.

    Attributes:
        session: the pipeline.
    """

    session: PipelineSession

    @property
    @abstractmethod
    def _module(self) -> LightningModule:
        """The user's module."""

    @abstractmethod
    def _network(self) -> Module:
        """What was cut: the module's ``model``."""

    @abstractmethod
    def drain(self) -> None:
        """Finish what is in flight and apply every update."""

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def full_state_dict(self) -> dict[str, Any]:
        """The whole module's ``state_dict`` on rank 0, this stage's part elsewhere; a collective that drains first."""
        self.session.running()
        self.drain()
        return gather_model_state(self.session, self._module.state_dict(), prefix="model.")

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self.full_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self.session.running()
        return gather_optimizer_state(self.session, optimizer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if self.session.optimizer is not None and "optimizer_states" in checkpoint:  # else weights only
            checkpoint[PIPELINE] = pipeline_state(self.session)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        elsewhere = tuple(f"model.{n}." for n, m in self._network().named_modules() if isinstance(m, OtherStage))
        state = {name: value for name, value in checkpoint["state_dict"].items() if not name.startswith(elsewhere)}
        error: Exception | None = None
        try:
            check_copies(checkpoint["state_dict"], self.session.whole_model.ties, prefix="model.")
            self._module.load_state_dict(state, strict=strict)
        except (RuntimeError, ConfigurationError) as caught:
            error = caught
        engine = self.session.running()
        agree_on_error(engine.mesh, error)
        if self.session.optimizer is None:
            engine.weights.restore(0, None)
        else:
            load_pipeline_state(self.session, checkpoint.get(PIPELINE))

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        mesh = self.session.running().mesh
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"]):
            optimizer.load_state_dict(to_device(own_optimizer_state(mesh, state), self.root_device))
