"""Fabric's checkpoints under ``delayed_gradient``: one file, with the older weights beside the newest."""

from __future__ import annotations

from typing import Any

from lightning.fabric.strategies.parallel import ParallelStrategy
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_asyncpp.core.emulator.delay_emulator import DelayEmulator
from lightning_asyncpp.errors import ConfigurationError
from lightning_asyncpp.fabric.checkpoint import entries_to_load
from lightning_asyncpp.fabric.refusals import reserved

DELAYED_GRADIENT = "delayed_gradient"


class DelayedCheckpoints(ParallelStrategy):
    """Saves and loads an emulated run.

    Attributes:
        emulator: keeps the older weights; ``None`` before there is an optimizer.
    """

    emulator: DelayEmulator | None
    _module: Module | None  # the model
    _resumed: bool  # whether the optimizer, or with it the model, was loaded and no step was made since
    _loaded_state: dict[str, Any] | None  # for the emulator that is about to be made

    @override
    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any | None = None, filter: Any | None = None
    ) -> None:
        """Write one file on rank 0; with the optimizer come the older weights, so that the run can go on exactly."""
        if DELAYED_GRADIENT in state:
            raise ConfigurationError(reserved(DELAYED_GRADIENT))
        if self.emulator is not None:
            self.emulator.check_no_update()
            self.emulator.weights.come_forward()
            if any(isinstance(value, Optimizer) for value in state.values()):
                state = {**state, DELAYED_GRADIENT: self.emulator.state_dict()}
        super().save_checkpoint(path, state, storage_options, filter)

    @override
    def load_checkpoint(
        self, path: Any, state: Any | None = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a file that :meth:`save_checkpoint` wrote; the run goes on as if it had not ended.

        Raises:
            ConfigurationError: the checkpoint was written under another delay, or was not written for this.
        """
        if self.emulator is not None:
            self.emulator.check_no_update()
        if not isinstance(state, dict):
            return super().load_checkpoint(path, state, strict, weights_only)
        optimizers = {name: value for name, value in state.items() if isinstance(value, Optimizer)}
        others = {name: value for name, value in state.items() if name not in optimizers}
        remainder = super().load_checkpoint(path, others, strict, weights_only)
        state.update(others)
        saved = remainder.pop(DELAYED_GRADIENT, None)
        self._resumed = self._resumed or bool(optimizers)
        has_model = any(isinstance(value, Module) and self._is_trained(value) for value in others.values())
        if self._resumed and (optimizers or has_model):  # they may come by two calls
            self._loaded_state = saved
            if self.emulator is not None:
                self.emulator.load_state_dict(saved)  # tells the optimizer the delay, under which it loads
        for name in entries_to_load(optimizers, remainder, strict):
            optimizers[name].load_state_dict(remainder.pop(name))
        return remainder

    @override
    def load_module_state_dict(self, module: Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        if self.emulator is not None:
            self.emulator.weights.come_forward()
        super().load_module_state_dict(module, state_dict, strict)
        if self.emulator is not None and self._is_trained(module):
            self.emulator.load_state_dict(None)

    def _is_trained(self, module: Module) -> bool:
        """Whether this is the model, with or without DDP's wrapper, and not another module beside it."""
        return self._module is not None and any(part is self._module for part in module.modules())
