"""The Trainer's checkpoints under ``delayed_gradient``: newest and older weights, all ranks' progress."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_asyncpp.core.emulator.delay_emulator import DelayEmulator
from lightning_asyncpp.core.optimizers.state_by_name import BY_PARAMETER
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.trainer.checkpoint.progress import PROGRESS, Progress

DELAYED_GRADIENT = "delayed_gradient"


class DelayedCheckpoints(ParallelStrategy):
    """Saves and loads an emulated run.

    Attributes:
        emulator: keeps the older weights; ``None`` before there is an optimizer.
        progress: what goes on with a run beside its weights.
    """

    emulator: DelayEmulator | None
    progress: Progress
    _emulated: LightningModule | None  # the module that the emulator belongs to
    _is_training: bool
    _loaded_state: Mapping[str, Any] | None  # for the emulator that is about to be made

    @property
    @abstractmethod
    def _module(self) -> LightningModule:
        """The user's module."""

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The newest weights, also in hooks between a forward and its backward."""
        if self.emulator is None:
            return super().lightning_module_state_dict()
        self.emulator.check_no_update()
        with self.emulator.weights.newest():
            return super().lightning_module_state_dict()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if self.emulator is not None and "optimizer_states" in checkpoint:  # else weights only
            own = self.progress.state(self._module.trainer, self._module, {})
            checkpoint[DELAYED_GRADIENT] = {**self.emulator.state_dict(), PROGRESS: self._of_all_ranks(own)}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _of_all_ranks(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        if self.world_size == 1:
            return [own]
        every: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(every, own)
        return every

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        content = super().load_checkpoint(checkpoint_path, weights_only)
        every = content.get(DELAYED_GRADIENT, {}).get(PROGRESS)
        if every is not None and self._module.trainer.state.fn == TrainerFn.FITTING:
            own = every[min(self.global_rank, len(every) - 1)]
            self.progress.resume(own, content["loops"]["fit_loop"], same_replicas=len(every) == self.world_size)
        return content

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self.emulator is not None:
            self.emulator.check_no_update()
        super().load_model_state_dict(checkpoint, strict)
        state = checkpoint.get(DELAYED_GRADIENT)
        if self.emulator is not None and self._is_training:  # a callback rolls a running training back
            self.emulator.load_state_dict(state)
            return
        # The older weights of a training that is over do not belong to the weights that were just loaded.
        self.emulator = self._emulated = None
        self._loaded_state = state

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if any(BY_PARAMETER in state for state in checkpoint["optimizer_states"]):
            raise ConfigurationError(
                "this checkpoint was written by a pipeline strategy, which keeps the optimizer by stages: load only the"
                " weights: pass the model loaded with load_state_dict, without ckpt_path"
            )
        super().load_optimizer_state_dict(checkpoint)
