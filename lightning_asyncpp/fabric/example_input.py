"""What the layers of a model are measured with in Fabric: an example of its arguments."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.plugins import Precision
from torch import nn

from lightning_asyncpp.pipeline.cut.unit_times import Example, arguments_in


def example_of(
    model: nn.Module, given: Any, micro_batches: int, precision: Precision, device: torch.device
) -> Example | None:
    """A call of the model with the example that was given, or else with its attribute ``example_input_array``.

    Args:
        model: what is cut.
        given: its arguments: a tensor, a tuple of positional or a dict of keyword arguments; None if there is nothing.
        micro_batches: the example counts as a batch, of which one micro-batch is taken.
        precision: of the run.
        device: where the layers run.
    """
    example = getattr(model, "example_input_array", None) if given is None else given
    if example is None:
        return None

    def call() -> tuple[tuple, dict[str, Any]]:
        return arguments_in(precision.convert_input(example), micro_batches)

    return Example(call, device, precision.forward_context, precision.convert_module)
