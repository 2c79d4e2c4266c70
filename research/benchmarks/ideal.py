"""Time of schedules without overheads, by the package's own simulation."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_asyncpp.core.schedule import Schedule, StalenessRule
from lightning_asyncpp.core.simulation import pace_of


def make_schedules(stages: int, delay: int, lookahead: int = 0, staleness: str = "least") -> list[Schedule]:
    """Return the schedules of a pipeline with a flush per mini-batch (delay 0) or without (delay 1)."""
    rule = StalenessRule(delay)
    return [Schedule(s, stages, lookahead, rule, staleness) for s in range(stages)]  # type: ignore[arg-type]


def ideal_milliseconds(schedules: Sequence[Schedule], microbatches: int, forward: float, backward: float) -> float:
    """Return the time per mini-batch without overheads and messages."""
    return pace_of(schedules, microbatches, forward, backward).step
