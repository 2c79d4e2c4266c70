"""Which cut a run gets, and what it goes by: what the user gave, what the model knows, what was measured, or sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from torch import nn

from lightning_asyncpp.pipeline.cut.partition import Partition, balanced, check_given, uniform
from lightning_asyncpp.pipeline.cut.stage import whole_before
from lightning_asyncpp.pipeline.cut.unit_times import Example, unit_times
from lightning_asyncpp.pipeline.cut.units import Unit, has_parameters, pipeline_units, spread
from lightning_asyncpp.pipeline.errors import ConfigurationError

Asked = Literal["auto", "uniform"] | Sequence[int]
"""What the user may ask for: a cut by costs, one by numbers of layers, or the number of layers of each stage."""


class _Costs(NamedTuple):
    """What units cost, in any unit, how that is known, and what to warn of."""

    values: tuple[float, ...]
    source: str
    remark: str = ""


def choose_partition(
    model: nn.Module, index: int, num_stages: int, asked: Asked, example: Example | None = None, seed: int = 0
) -> Partition:
    """Decide how many units each stage gets.

    It may measure, so that two processes could decide differently: one decides for all.

    Args:
        model: an ``nn.Sequential`` or a module with ``pipeline_layers()``; whole, or cut before.
        index: stage of this process.
        num_stages: number of stages.
        asked: the user's argument ``partition``; numbers are at least 1 each, one per stage.
        example: to measure units where the model does not know what they cost.
        seed: of the run.

    Raises:
        ConfigurationError: the model cannot be cut so, with the numbers.
    """
    units = pipeline_units(model)
    before = whole_before(units, index, num_stages)
    heavy = [has_parameters(unit) for unit in units] if before is None else before.has_parameters
    even = tuple(uniform(heavy, num_stages))
    if num_stages == 1:
        if not isinstance(asked, str):
            check_given(asked, heavy)
        return Partition((len(units),), even, "as the whole")
    if before is not None and asked == "auto":
        return Partition(before.counts, even, "as the model was cut before")
    if asked == "auto":
        costs = _costs(model, units, example, seed)
        counts = balanced(costs.values, heavy, num_stages)
        return Partition(tuple(counts), even, f"by {costs.source}", costs.values, costs.remark)
    known = _model_costs(model, units) if before is None else None
    values = () if known is None else known.values
    if isinstance(asked, str):
        return Partition(even, even, "by numbers of layers", values)
    check_given(asked, heavy)
    return Partition(tuple(asked), even, "as given", values)


def can_be_cut(model: nn.Module, num_stages: int) -> bool:
    """Whether a model has layers for so many stages."""
    try:
        spread(pipeline_units(model), num_stages)
    except ConfigurationError:
        return False
    return True


def _costs(model: nn.Module, units: Sequence[Unit], example: Example | None, seed: int) -> _Costs:
    """The best that is known of what units cost."""
    if (known := _model_costs(model, units)) is not None:
        return known
    sizes = _Costs(tuple(_size(unit) for unit in units), "numbers of parameters")
    if example is None:
        return sizes
    try:
        return _Costs(tuple(unit_times(units, example, seed)), "measured times")
    except Exception as error:
        # It has no say in what is computed, and may have been written for something else: the run goes on.
        return sizes._replace(
            remark="partition='auto' could not run the layers on example_input_array, and goes by numbers of parameters"
            f" instead ({type(error).__name__}: {error}): mend the example, or give partition='uniform' or the number"
            " of layers of each stage"
        )


def _model_costs(model: nn.Module, units: Sequence[Unit]) -> _Costs | None:
    """What the model's own ``pipeline_costs()`` says; None if it has none."""
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


def _size(unit: Unit) -> float:
    return float(sum(parameter.numel() for parameter in unit.module.parameters()))
