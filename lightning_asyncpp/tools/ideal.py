"""The timeline of a schedule without overheads: its action lists, run on stages that take a given time each."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_asyncpp.pipeline.schedule import Action, Kind, Schedule
from lightning_asyncpp.pipeline.trace import Span


class DeadlockError(RuntimeError):
    """Every stage waits for another one."""


def simulate(
    schedules: Sequence[Schedule],
    mini_batches: int,
    micro_batches: int,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 2.0,
) -> list[list[Span]]:
    """Run the action lists of all stages; messages and updates take no time.

    Args:
        schedules: of each stage, the first stage first.
        mini_batches: how many.
        micro_batches: per mini-batch.
        forward: time of a forward, or that of each stage.
        backward: time of a backward, or that of each stage.

    Returns:
        The spans of each stage; an update is one without length.

    Raises:
        DeadlockError: the order cannot be run.
    """
    todo = [schedule.run(mini_batches, micro_batches)[::-1] for schedule in schedules]
    lanes: list[list[Span]] = [[] for _ in schedules]
    ends: dict[tuple[Kind, int, int], float] = {}
    lengths = [
        {Kind.FORWARD: f, Kind.BACKWARD: b, Kind.UPDATE: 0.0}
        for f, b in zip(_per_stage(forward, schedules), _per_stage(backward, schedules))
    ]
    while any(todo):
        moved = False
        for stage, actions in enumerate(todo):
            while actions and (ready := _ready(ends, stage, len(schedules), actions[-1], micro_batches)) is not None:
                action = actions.pop()
                start = max(ready, lanes[stage][-1].end if lanes[stage] else 0.0)
                lanes[stage].append(Span(action.kind, action.index, start, start + lengths[stage][action.kind]))
                ends[action.kind, stage, action.index] = lanes[stage][-1].end
                moved = True
        if not moved:
            raise DeadlockError(f"stages wait for each other: {[str(actions[-1]) for actions in todo if actions]}")
    return lanes


def _per_stage(time: float | Sequence[float], schedules: Sequence[Schedule]) -> Sequence[float]:
    times = time if isinstance(time, Sequence) else [time] * len(schedules)
    if len(times) != len(schedules):
        raise ValueError(f"{len(times)} times were given for {len(schedules)} stages")
    return times


def _ready(
    ends: dict[tuple[Kind, int, int], float], stage: int, num_stages: int, action: Action, micro_batches: int
) -> float | None:
    """When what an action needs from other stages is there; None if that is not known yet."""
    if action.kind is Kind.FORWARD:
        return ends.get((Kind.FORWARD, stage - 1, action.index)) if stage > 0 else 0.0
    if action.kind is Kind.BACKWARD:
        return ends.get((Kind.BACKWARD, stage + 1, action.index)) if stage + 1 < num_stages else 0.0
    # The control message needs the complete gradient of every stage.
    last = (action.index + 1) * micro_batches - 1
    needed = [ends.get((Kind.BACKWARD, other, last)) for other in range(num_stages)]
    known = [end for end in needed if end is not None]
    return max(known) if len(known) == num_stages else None
