"""A LightningModule's ``example_input_array`` under a pipeline: what layers are measured with, and kept from others."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision
from torch import device, nn

from lightning_asyncpp.pipeline.cut.unit_times import Example, example_of
from lightning_asyncpp.pipeline.errors import ConfigurationError
from lightning_asyncpp.pipeline.step.model_call import ModelCall


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
