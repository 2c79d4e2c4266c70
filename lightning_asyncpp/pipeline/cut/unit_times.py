"""What each unit of a model takes: its forward and its backward, timed on a micro-batch.

One unit after the other, on a copy that is dropped again: a model on the meta device needs the memory of one unit, and
a real one keeps its weights, its buffers and its generators as they are.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_asyncpp.auxiliary import collecting
from lightning_asyncpp.pipeline.batches.micro_batch import number_of_samples
from lightning_asyncpp.pipeline.batches.tree import map_tensors, tensors_of
from lightning_asyncpp.pipeline.cut.materialize import materialize
from lightning_asyncpp.pipeline.cut.units import Unit
from lightning_asyncpp.pipeline.randomness import seeded
from lightning_asyncpp.pipeline.wire.received import begin

RUNS = 5
"""How often a unit is timed; the fastest counts, for what disturbs a run only ever makes it slower."""
_WARM_UP = 2


@dataclass(frozen=True)
class Example:
    """A call of the model with one micro-batch, and how its units are run.

    Attributes:
        call: returns the positional and the keyword arguments of the model.
        device: where units run.
        context: entered around every forward, for the precision.
        convert: brings a unit to the run's precision.
    """

    call: Callable[[], tuple[tuple, dict[str, Any]]]
    device: torch.device
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    convert: Callable[[nn.Module], nn.Module] = lambda module: module


def example_of(
    given: Any,
    micro_batches: int,
    precision: Any,
    device: torch.device,
    through: Callable[..., tuple[tuple, dict[str, Any]]] | None = None,
) -> Example | None:
    """A call of the model with an example of its arguments; None if there is no example.

    Args:
        given: the example: a tensor, a tuple of positional or a dict of keyword arguments, or None.
        micro_batches: it counts as a batch, of which one micro-batch is taken.
        precision: Lightning's plugin for that of the run.
        device: where the layers run.
        through: from the arguments in the example to those of the model; None: they are the model's.
    """
    if given is None:
        return None

    def call() -> tuple[tuple, dict[str, Any]]:
        args, kwargs = arguments_in(precision.convert_input(given), micro_batches)
        return (args, kwargs) if through is None else through(*args, **kwargs)

    return Example(call, device, precision.forward_context, precision.convert_module)


def arguments_in(example: Any, micro_batches: int) -> tuple[tuple, dict[str, Any]]:
    """Read an example input as Lightning does: a tuple or list of positional arguments, a dict of keyword arguments.

    Args:
        example: these, or a single argument.
        micro_batches: of a batch of this size; what has one entry per sample is cut to the first of them.

    Raises:
        ConfigurationError: it holds no tensor with a batch dimension.
    """
    samples = number_of_samples(example)
    size = -(-samples // micro_batches)
    piece = map_tensors(lambda t: t[:size] if t.ndim and len(t) == samples else t, example)
    if isinstance(piece, dict):
        return (), piece
    return (tuple(piece) if isinstance(piece, (tuple, list)) else (piece,)), {}


def unit_times(units: Sequence[Unit], example: Example, seed: int) -> list[float]:
    """Seconds that the forward and the backward of each unit take.

    Args:
        units: of a whole model, in order; on the meta device or not.
        example: what the first one is called with.
        seed: meta tensors are initialised from it.
    """
    device, times = example.device, []
    with torch.inference_mode(False), torch.enable_grad(), seeded(seed, device):
        args, kwargs = map_tensors(lambda tensor: tensor.to(device), example.call())
        for unit in units:
            seconds, output = _time(_own_copy(unit, seed, device), args, kwargs, example)
            times.append(seconds)
            args, kwargs = (output,), {}
    return times


def _own_copy(unit: Unit, seed: int, device: torch.device) -> Unit:
    alone = unit._replace(module=copy.deepcopy(unit.module))
    materialize([alone], [0], seed, device)
    alone.module.to(device)
    return alone


def _time(unit: Unit, args: tuple, kwargs: dict[str, Any], example: Example) -> tuple[float, Any]:
    """The shortest time of forward and backward in seconds, and the output without its graph."""
    unit = unit._replace(module=example.convert(unit.module).train())
    seconds = []
    output: Any = None
    for _ in range(_WARM_UP + RUNS):
        inputs, options = map_tensors(_as_received, (args, kwargs))
        start = _now(example.device)
        with example.context(), collecting() as said:
            output = unit.apply(inputs, options)
        ends = [t for t in (*tensors_of(output), *said.losses) if t.requires_grad]
        torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
        seconds.append(_now(example.device) - start)
    return min(seconds[_WARM_UP:]), map_tensors(lambda t: t.detach().requires_grad_(t.requires_grad), output)


def _as_received(tensor: Tensor) -> Tensor:
    # A copy: layers may change what they are given in place, and the next run needs it as it was.
    fresh = tensor.detach().clone()
    return begin(fresh)[0] if tensor.requires_grad else fresh


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
