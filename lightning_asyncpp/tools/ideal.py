"""The timeline of a schedule without overheads: its action lists, run on stages whose times are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from lightning_asyncpp.pipeline.schedule import Action, Kind, Schedule
from lightning_asyncpp.pipeline.trace import Span, utilisation

Duration: TypeAlias = float | Callable[[int, int], float]
"""A time, the same everywhere, or a function of the stage and of the micro-batch counted over the run."""


class DeadlockError(RuntimeError):
    """Every stage waits for another one."""


def simulate(
    schedules: Sequence[Schedule],
    mini_batches: int,
    micro_batches: int,
    forward: Duration = 1.0,
    backward: Duration = 2.0,
    hop: float = 0.0,
) -> list[list[Span]]:
    """Run the action lists of all stages; updates take no time.

    Args:
        schedules: of each stage, the first stage first.
        mini_batches: how many.
        micro_batches: per mini-batch.
        forward: time of a forward.
        backward: time of a backward.
        hop: time of a message between two stages, in the same unit; sending keeps nobody busy. The control message of
            an update is summed from the last stage to the first, which tells all.

    Returns:
        The spans of each stage; an update is one without length.

    Raises:
        DeadlockError: the order cannot be run.
    """
    todo = [schedule.run(mini_batches, micro_batches)[::-1] for schedule in schedules]
    lanes: list[list[Span]] = [[] for _ in schedules]
    ends: dict[tuple[Kind, int, int], float] = {}
    lengths: dict[Kind, Duration] = {Kind.FORWARD: forward, Kind.BACKWARD: backward, Kind.UPDATE: 0.0}
    shape = len(schedules), micro_batches, hop
    while any(todo):
        moved = False
        for stage, actions in enumerate(todo):
            while actions and (ready := _ready(ends, stage, actions[-1], shape)) is not None:
                action = actions.pop()
                start = max(ready, lanes[stage][-1].end if lanes[stage] else 0.0)
                lanes[stage].append(
                    Span(action.kind, action.index, start, start + _length(lengths[action.kind], stage, action.index))
                )
                ends[action.kind, stage, action.index] = lanes[stage][-1].end
                moved = True
        if not moved:
            raise DeadlockError(f"stages wait for each other: {[str(actions[-1]) for actions in todo if actions]}")
    return lanes


def steady_utilisation(
    lanes: Sequence[Sequence[Span]], micro_batches: int, first_batch: int, last_batch: int
) -> tuple[float, float]:
    """Time per mini-batch, and the share of it that the busiest stage works, between two mini-batches.

    Args:
        lanes: what :func:`simulate` returned.
        micro_batches: per mini-batch.
        first_batch: the time from the end of this mini-batch's last backward counts, on the first stage,
        last_batch: until the end of this one's.
    """
    ends = {span.index: span.end for span in lanes[0] if span.kind is Kind.BACKWARD}
    start, end = (ends[(t + 1) * micro_batches - 1] for t in (first_batch, last_batch))
    return (end - start) / (last_batch - first_batch), max(utilisation(lane, start, end) for lane in lanes)


def _length(duration: Duration, stage: int, index: int) -> float:
    return duration(stage, index) if callable(duration) else duration


def _ready(
    ends: dict[tuple[Kind, int, int], float], stage: int, action: Action, shape: tuple[int, int, float]
) -> float | None:
    """When what an action needs from other stages is there; None if that is not known yet."""
    num_stages, micro_batches, hop = shape
    if action.kind is Kind.FORWARD:
        return _arrival(ends.get((Kind.FORWARD, stage - 1, action.index)), hop) if stage > 0 else 0.0
    if action.kind is Kind.BACKWARD:
        return _arrival(ends.get((Kind.BACKWARD, stage + 1, action.index)), hop) if stage + 1 < num_stages else 0.0
    # The control message needs the complete gradient of every stage.
    last = (action.index + 1) * micro_batches - 1
    total = 0.0
    for other in reversed(range(num_stages)):
        end = ends.get((Kind.BACKWARD, other, last))
        if end is None:
            return None
        total = max(total + hop, end)
    return total + (hop if stage > 0 else 0.0)


def _arrival(end: float | None, hop: float) -> float | None:
    return None if end is None else end + hop
