"""What is asked of a LightningModule before and after it is cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision
from torch import device, nn
from torch.optim import Optimizer

from lightning_asyncpp.core.cut.network import network_in, network_name
from lightning_asyncpp.core.cut.partition_choice import Example, example_of
from lightning_asyncpp.core.model_call import ModelCall

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


@contextmanager
def hidden_example(module: LightningModule) -> Iterator[None]:
    """Take ``example_input_array`` from a module meanwhile: the summary and loggers would run the whole with it."""
    example, module.example_input_array = module.example_input_array, None
    try:
        yield
    finally:
        module.example_input_array = example


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
