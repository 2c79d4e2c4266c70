"""What schedules would take without overheads, by the package's own simulation of them."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_asyncpp.core.schedule import Kind, Schedule, StalenessRule
from lightning_asyncpp.core.simulation import simulate
from lightning_asyncpp.core.trace import Span, utilisation


def make_schedules(stages: int, delay: int, lookahead: int = 0, staleness: str = "least") -> list[Schedule]:
    """Of a pipeline with a flush per mini-batch (delay 0) or without (delay 1)."""
    rule = StalenessRule(delay)
    return [Schedule(s, stages, lookahead, rule, staleness) for s in range(stages)]  # type: ignore[arg-type]


def steady_state(lanes: Sequence[Sequence[Span]], microbatches: int, first: int, last: int) -> tuple[float, float]:
    """Time per mini-batch, and utilisation of the busiest stage, from mini-batch ``first`` to mini-batch ``last``."""
    ends = {span.index: span.end for span in lanes[0] if span.kind is Kind.BACKWARD}
    start, end = (ends[(t + 1) * microbatches - 1] for t in (first, last))
    return (end - start) / (last - first), max(utilisation(list(lane), start, end) for lane in lanes)


def ideal_milliseconds(schedules: Sequence[Schedule], microbatches: int, forward: float, backward: float) -> float:
    """Time per mini-batch without overheads and messages."""
    lanes = simulate(schedules, 8, microbatches, forward, backward)
    return steady_state(lanes, microbatches, 3, 6)[0]
