"""What is asked of a LightningModule before and after it is cut.

* Its ``example_input_array``: what layers are measured with, and kept from others.
* What is left of it behind a pipeline: its ``state_dict()`` holds one stage, which may be taken for the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning as L
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision
from torch import device, nn
from torch.optim import Optimizer

from lightning_asyncpp.core.cut.module_as_network import called_by_steps
from lightning_asyncpp.core.cut.network import network_in, network_name
from lightning_asyncpp.core.cut.partition_choice import Example, example_of
from lightning_asyncpp.core.cut.whole_model import whole_of
from lightning_asyncpp.core.runner import ModelCall
from lightning_asyncpp.errors import ConfigurationError

_NO_STATE_DICT = "_pipeline_no_state_dict"  # attribute of a network: why it gives none


def modules_example(
    module: LightningModule, network: nn.Module, micro_batches: int, precision: Precision, device: device
) -> Example | None:
    """The call of ``network`` that the module's ``example_input_array`` leads to; None without one.

    The module's ``forward`` is run up to its call of the network; without one, the example is the network's own.
    """

    def through(*args: Any, **kwargs: Any) -> tuple[tuple, dict[str, Any]]:
        return ModelCall(network).capture(lambda: module(*args, **kwargs))

    has_forward = type(module).forward is not LightningModule.forward
    given = module.example_input_array
    return example_of(given, micro_batches, precision, device, through if has_forward else None)


class HiddenExample:
    """Takes ``example_input_array`` from a module while it is cut: the summary and loggers would run the whole with it.

    Args:
        module: whose example it is.

    Raises:
        ConfigurationError: the module computes it, so that it cannot be taken away.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module, self._example = module, module.example_input_array
        try:
            self._set(None)
        except AttributeError:
            raise ConfigurationError(
                f"example_input_array of {type(module).__name__} is a property that cannot be set: the summary and"
                " loggers would run the whole model with it, of which each rank has one stage; assign it in __init__"
                " instead (self.example_input_array = ...)"
            ) from None

    def release(self) -> None:
        """Give it back; may be called twice."""
        if self._example is not None:
            self._set(self._example)

    def _set(self, example: Any) -> None:
        self._module.example_input_array = example


def optimizers_in(configured: Any) -> list[Optimizer]:
    """The optimizers among what a ``configure_optimizers`` returned, in any of Lightning's forms."""
    if isinstance(configured, Optimizer):
        return [configured]
    if isinstance(configured, Mapping):
        return optimizers_in(configured.get("optimizer"))
    if isinstance(configured, (list, tuple)):
        if configured and isinstance(configured[0], (list, tuple)):
            configured = configured[0]  # optimizers and schedulers
        return [optimizer for entry in configured for optimizer in optimizers_in(entry)]
    return []


@contextmanager
def without_meta_tensors(module: LightningModule | None) -> Iterator[None]:
    """Hide a network that was refused before it was materialised: moving it to the CPU would hide the reason."""
    network = network_in(module)
    is_attribute = module is not None and network is getattr(module, network_name(module), None)
    if module is None or network is None or not is_attribute or not any(p.is_meta for p in network.parameters()):
        yield
        return
    name = network_name(module)
    setattr(module, name, None)
    try:
        yield
    finally:
        setattr(module, name, network)


def refuse_state_dict(module: LightningModule, checkpoint: str = "") -> None:
    """From now on refuse the ``state_dict()`` of a cut module, its network or a copy: it would hold one stage.

    Args:
        module: that a training, or an evaluation, leaves behind.
        checkpoint: that the training saved last, or best; empty if none.
    """
    saved = f", or load {checkpoint}, which holds all" if checkpoint else ""
    text = (
        f"state_dict() of {type(module).__name__}, or of a part of it, would hold the layers of this rank's pipeline"
        " stage alone: call trainer.strategy.full_state_dict() on every rank, which gathers all layers on rank 0, or"
        f" trainer.save_checkpoint(path) on every rank{saved}"
    )
    if whole_of(network := network_in(module)) is None:
        return
    called = called_by_steps(network)  # type: ignore[arg-type]
    if _NO_STATE_DICT not in vars(called):
        called.register_state_dict_pre_hook(_refuse)
    vars(called)[_NO_STATE_DICT] = text


def _refuse(network: nn.Module, *_: Any) -> None:
    """Before the ``state_dict()`` of a network that was cut, or of a copy of it."""
    if text := vars(network).get(_NO_STATE_DICT):
        raise ConfigurationError(text)


def last_saved(trainer: L.Trainer) -> str:
    """Path of the checkpoint that a training saved best, or else last; empty if none."""
    callback = trainer.checkpoint_callback
    return str(getattr(callback, "best_model_path", "") or getattr(callback, "last_model_path", ""))


@contextmanager
def with_state_dict(module: LightningModule) -> Iterator[None]:
    """Give the ``state_dict()`` of a cut module meanwhile, to be gathered from all stages."""
    before = allow_state_dict(module)
    try:
        yield
    finally:
        if before:
            vars(called_by_steps(network_in(module)))[_NO_STATE_DICT] = before  # type: ignore[arg-type]


def allow_state_dict(module: LightningModule) -> str:
    """A strategy looks after the module again, and after all stages; return why there was no ``state_dict()``."""
    network = network_in(module)
    attributes = {} if network is None else vars(called_by_steps(network))
    text: str = attributes.get(_NO_STATE_DICT, "")
    if text:
        attributes[_NO_STATE_DICT] = ""
    return text
