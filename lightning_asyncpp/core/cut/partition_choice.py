"""Choice of a partition, the number of units on each stage: by argument, costs, times or numbers of parameters.

A unit is a part of the model between two possible cuts. To measure times, a temporary copy of each unit runs forward
and backward on a microbatch, one unit after the other. So a model on the meta device needs the memory of one unit only,
and the weights and buffers of a real model do not change.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_asyncpp.auxiliary import collecting
from lightning_asyncpp.core.cut.cutting import materialize, whole_before
from lightning_asyncpp.core.cut.partition import Partition, balanced, check_given, uniform
from lightning_asyncpp.core.cut.units import Unit, has_parameters, pipeline_units
from lightning_asyncpp.core.microbatch import number_of_samples
from lightning_asyncpp.core.randomness import seeded
from lightning_asyncpp.core.tree import map_tensors, tensors_of
from lightning_asyncpp.core.wire.transport import begin
from lightning_asyncpp.errors import ConfigurationError

RUNS = 5
"""Number of timed runs of a unit; the fastest counts, since disturbances can only slow a run down."""
_WARM_UP = 2
BY_SIZE = "numbers of parameters"
"""Basis of a partition if no costs are known."""
Asked = Literal["auto", "uniform"] | Sequence[int]
"""Argument ``partition``: ``"auto"`` by costs, ``"uniform"`` by numbers of layers, or each stage's number of layers."""


@dataclass(frozen=True)
class Example:
    """Call of the model with one microbatch, and settings for the runs of its units.

    Attributes:
        call: function that returns the positional and the keyword arguments of the model.
        device: device on which units run.
        context: context manager around every forward, for the precision.
        convert: function that converts a unit to the precision of the run.
    """

    call: Callable[[], tuple[tuple, dict[str, Any]]]
    device: torch.device
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    convert: Callable[[nn.Module], nn.Module] = lambda module: module


class _Costs(NamedTuple):
    """Relative costs of units, their source, and a warning."""

    values: tuple[float, ...]
    source: str
    remark: str = ""


def choose_partition(
    model: nn.Module, index: int, num_stages: int, asked: Asked, example: Example | None = None, seed: int = 0
) -> Partition:
    """Choose the number of units of each stage.

    The choice may depend on measurements, so one process must choose for all.

    Args:
        model: ``nn.Sequential`` or module with ``pipeline_layers()``, whole or cut before.
        index: stage of this process.
        num_stages: number of stages.
        asked: the user's argument ``partition``; a list has one number per stage, each at least 1.
        example: example for measurements if the model has no ``pipeline_costs()``.
        seed: seed of the run.

    Raises:
        ConfigurationError: the model cannot be cut with this partition.
    """
    units = pipeline_units(model)
    before = whole_before(model, index, num_stages)
    heavy = [has_parameters(unit) for unit in units] if before is None else before.has_parameters
    even = tuple(uniform(heavy, num_stages))  # raises if there are too few layers
    if num_stages == 1:
        if not isinstance(asked, str):
            check_given(asked, heavy)
        return Partition((len(units),), "for a single stage")
    if before is not None and asked == "auto":
        return Partition(before.counts, "as the model was cut before")
    if asked == "auto":
        costs = _costs(model, units, example, seed)
        counts = balanced(costs.values, heavy, num_stages)
        return Partition(tuple(counts), f"by {costs.source}", costs.values, costs.remark)
    known = _model_costs(model, units) if before is None else None
    values = () if known is None else known.values
    if isinstance(asked, str):
        return Partition(even, "by numbers of layers", values)
    check_given(asked, heavy)
    return Partition(tuple(asked), "as given", values)


def example_of(
    given: Any,
    microbatches: int,
    precision: Any,
    device: torch.device,
    through: Callable[..., tuple[tuple, dict[str, Any]]] | None = None,
) -> Example | None:
    """Return the example for measurements; None if ``given`` is None.

    Args:
        given: arguments of a batch: a tensor, a tuple of positional arguments, a dict of keyword arguments, or None.
        microbatches: number of microbatches of the batch, of which the first is used.
        precision: Lightning's precision plugin.
        device: device on which the layers run.
        through: function that converts the example's arguments to the model's arguments; default: no conversion.
    """
    if given is None:
        return None

    def call() -> tuple[tuple, dict[str, Any]]:
        args, kwargs = arguments_in(precision.convert_input(given), microbatches)
        return (args, kwargs) if through is None else through(*args, **kwargs)

    return Example(call, device, precision.forward_context, precision.convert_module)


def arguments_in(example: Any, microbatches: int) -> tuple[tuple, dict[str, Any]]:
    """Return an example input as a call, as :func:`call_of` does, with the first microbatch of its batch.

    Args:
        example: arguments of a batch.
        microbatches: number of microbatches of the batch. Tensors with one row per sample are cut to the rows of the
            first microbatch.

    Raises:
        ConfigurationError: ``example`` has no tensor with a batch dimension.
    """
    samples = number_of_samples(example)
    size = -(-samples // microbatches)
    return call_of(map_tensors(lambda t: t[:size] if t.ndim and len(t) == samples else t, example))


def call_of(example: Any) -> tuple[tuple, dict[str, Any]]:
    """Return an example input as a call.

    As for Lightning, a mapping has keyword arguments, a tuple or list has positional arguments, and an example of
    another type is the only argument.
    """
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example) if isinstance(example, (tuple, list)) else (example,)), {}


def unit_times(units: Sequence[Unit], example: Example, seed: int) -> list[float]:
    """Return the time of the forward and backward of each unit, in seconds.

    Args:
        units: units of a whole model, in order; on any device, including meta.
        example: call of the first unit.
        seed: seed for the initialisation of meta tensors.
    """
    device, times = example.device, []
    with torch.inference_mode(False), torch.enable_grad(), seeded(seed, device):
        args, kwargs = map_tensors(lambda tensor: tensor.to(device), example.call())
        for unit in units:
            seconds, output = _time(_own_copy(unit, seed, device), args, kwargs, example)
            times.append(seconds)
            args, kwargs = (output,), {}
    return times


def _costs(model: nn.Module, units: Sequence[Unit], example: Example | None, seed: int) -> _Costs:
    """Return the best available costs of units."""
    if (known := _model_costs(model, units)) is not None:
        return known
    sizes = _Costs(tuple(float(sum(p.numel() for p in unit.module.parameters())) for unit in units), BY_SIZE)
    if example is None:
        return sizes
    try:
        return _Costs(tuple(unit_times(units, example, seed)), "measured times")
    except Exception as error:
        # The run goes on: costs do not affect results, and the example may be meant for another purpose.
        return sizes._replace(
            remark="partition='auto' could not run the layers on example_input_array, and uses numbers of parameters"
            f" instead ({type(error).__name__}: {error}): correct the example, or set partition to 'uniform' or to the"
            " number of layers of each stage"
        )


def _model_costs(model: nn.Module, units: Sequence[Unit]) -> _Costs | None:
    """Return the costs from the model's ``pipeline_costs()``; None without this method."""
    method: Any = getattr(model, "pipeline_costs", None)
    if not callable(method):
        return None
    costs = list(method())
    wrong = [c for c in costs if isinstance(c, bool) or not isinstance(c, (int, float)) or not 0 <= c < math.inf]
    if wrong or len(costs) != len(units) or not any(costs):
        raise ConfigurationError(
            f"{type(model).__name__}.pipeline_costs() must return one cost for each of the {len(units)} layers, finite"
            f" numbers, 0 or more, and not all 0; it returned {len(costs)}: {costs}"
        )
    return _Costs(tuple(map(float, costs)), "pipeline_costs()")


def _own_copy(unit: Unit, seed: int, device: torch.device) -> Unit:
    alone = unit._replace(module=copy.deepcopy(unit.module))
    materialize([alone], [0], seed, device)
    alone.module.to(device)
    return alone


def _time(unit: Unit, args: tuple, kwargs: dict[str, Any], example: Example) -> tuple[float, Any]:
    """Return the shortest time of forward and backward in seconds, and the detached output."""
    unit = unit._replace(module=example.convert(unit.module).train())
    seconds = []
    output: Any = None
    for _ in range(_WARM_UP + RUNS):
        inputs, options = map_tensors(_as_received, (args, kwargs))
        start = _now(example.device)
        with example.context(), collecting() as collected:
            output = unit.apply(inputs, options)
        ends = [t for t in (*tensors_of(output), *collected.losses) if t.requires_grad]
        torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
        seconds.append(_now(example.device) - start)
    return min(seconds[_WARM_UP:]), map_tensors(lambda t: t.detach().requires_grad_(t.requires_grad), output)


def _as_received(tensor: Tensor) -> Tensor:
    # Return a copy: layers may change their inputs in place, and the next run needs the original.
    fresh = tensor.detach().clone()
    return begin(fresh)[0] if tensor.requires_grad else fresh


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
