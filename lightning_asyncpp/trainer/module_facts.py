"""What is asked of a LightningModule before and after it is cut.

* Its ``example_input_array``: what layers are measured with, and kept from others.
* Whether its ``configure_optimizers`` gives a stage's parameters what it would give them in the whole model.
* What is left of it behind a pipeline: its ``state_dict()`` holds one stage, which may be taken for the whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import lightning as L
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision
from torch import Tensor, device, nn
from torch.optim import Optimizer

from lightning_asyncpp.core.cut.elsewhere import OtherStage
from lightning_asyncpp.core.cut.network import network_in, network_name
from lightning_asyncpp.core.cut.partition_choice import Example, example_of
from lightning_asyncpp.core.cut.stage import Stage
from lightning_asyncpp.core.cut.ties import names_on
from lightning_asyncpp.core.model_call import ModelCall
from lightning_asyncpp.core.optimizers.by_position import (
    asked_again,
    may_go_by_position,
    options_of,
    position_problems,
)
from lightning_asyncpp.errors import ConfigurationError


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


class Grouping(NamedTuple):
    """What is known of an optimizer's groups.

    Attributes:
        problems: what is wrong with those of a stage: they go by the position of parameters.
        of_whole: the groups that the whole model's would have; None if nobody knows.
    """

    problems: list[str]
    of_whole: Sequence[Mapping[str, Any]] | None


def grouping_of(optimizers: Sequence[Optimizer], module: LightningModule, stage: Stage) -> Grouping:
    """Compare the groups of a stage that trains for the first time with those of the whole model.

    Args:
        optimizers: as configure_optimizers made them.
        module: with the stage in it.
        stage: as it was cut.
    """
    layers = stage.layers_elsewhere
    trained = [parameter for parameter in stage.parameters.values() if parameter.requires_grad]
    if not optimizers or not may_go_by_position(optimizers, trained):
        return Grouping([], optimizers[0].param_groups if optimizers else None)
    if not layers:
        return Grouping([], optimizers[0].param_groups if stage.num_stages == 1 else None)
    # What stages share has another name in the whole; their copies are compared with each other.
    shared = {stage.parameters[name] for name in names_on(stage.index, stage.whole.ties)}
    names: dict[Tensor, str] = {p: name for name, p in module.named_parameters() if p not in shared}
    try:
        again = asked_again(module, stage.model, layers, module.configure_optimizers)
    except Exception as error:
        warnings.warn(
            "configure_optimizers makes several groups of parameters, or leaves some out. Whether it gives this stage's"
            f" what it would give them in the whole model was not looked at, for it raised {type(error).__name__}:"
            f" {error}",
            stacklevel=2,
        )
        return Grouping([], None)
    problems = position_problems(options_of(optimizers, names), options_of(again, names))
    return Grouping(problems, again[0].param_groups if again else None)


def groups_of_whole(module: LightningModule, stage: Stage) -> Sequence[Mapping[str, Any]] | None:
    """The groups that the whole model's optimizer would have, of a stage that has one; None if nobody knows.

    Args:
        module: with the stage in it; its configure_optimizers is called.
        stage: as it was cut.
    """
    if not stage.layers_elsewhere:
        return None
    try:
        again = asked_again(module, stage.model, stage.layers_elsewhere, module.configure_optimizers)
    except Exception:  # it may be called once alone
        return None
    return again[0].param_groups if again else None


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
    for other in _others(module):
        other.no_state_dict = text


def last_saved(trainer: L.Trainer) -> str:
    """Path of the checkpoint that a training saved best, or else last; empty if none."""
    callback = trainer.checkpoint_callback
    return str(getattr(callback, "best_model_path", "") or getattr(callback, "last_model_path", ""))


def allow_state_dict(module: LightningModule) -> None:
    """A strategy looks after the module again, and after all stages."""
    for other in _others(module):
        other.no_state_dict = None


@contextmanager
def with_state_dict(module: LightningModule) -> Iterator[None]:
    """Give the ``state_dict()`` of a cut module meanwhile, to be gathered from all stages."""
    before = {other: other.no_state_dict for other in _others(module)}
    allow_state_dict(module)
    try:
        yield
    finally:
        for other, text in before.items():
            other.no_state_dict = text


def _others(module: LightningModule) -> list[OtherStage]:
    return [part for part in module.modules() if isinstance(part, OtherStage)]
