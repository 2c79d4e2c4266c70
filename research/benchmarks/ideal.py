"""The timeline of a schedule without overheads: its own list of actions, on stages whose times are known."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from lightning_asyncpp.core.schedule import Action, Kind, Schedule, StalenessRule
from research.benchmarks.stages import Span, busy_share


def make_schedules(stages: int, delay: int, lookahead: int = 0, staleness: str = "least") -> list[Schedule]:
    """Of a pipeline with a flush per mini-batch (delay 0) or without (delay 1)."""
    rule = StalenessRule(delay)
    return [Schedule(s, stages, lookahead, rule, staleness) for s in range(stages)]  # type: ignore[arg-type]


def simulate(
    schedules: Sequence[Schedule],
    mini_batches: int,
    micro_batches: int,
    length: Callable[[Kind, int, int], float],
    hop: float = 0.0,
) -> list[list[Span]]:
    """Run the actions of all stages in their order, each as soon as what it needs is there.

    Args:
        schedules: of each stage, the first stage first.
        mini_batches, micro_batches: how many, and how many of the latter per mini-batch.
        length: kind, stage and micro-batch -> time of a forward or backward; updates take none.
        hop: time of a message between neighbours.

    Returns:
        The spans of each stage.
    """
    todo = [deque(schedule.run(mini_batches, micro_batches)) for schedule in schedules]
    lanes: list[list[Span]] = [[] for _ in schedules]
    arrivals: dict[tuple[Kind, int, int], float] = {}  # what a stage has sent
    while any(todo):
        left = sum(map(len, todo))
        for stage, (actions, lane) in enumerate(zip(todo, lanes, strict=True)):
            while actions:
                source = _source(schedules, stage, actions[0], micro_batches)
                if source is not None and source not in arrivals:
                    break
                kind, index = actions[0].kind, actions.popleft().index
                ready = arrivals[source] if source else 0.0
                start = max(ready, lane[-1].end if lane else 0.0)
                end = start + (0.0 if kind is Kind.UPDATE else length(kind, stage, index))
                lane.append(Span(kind, index, start, end))
                arrivals[kind, stage, index] = end + hop
        if sum(map(len, todo)) == left:
            raise RuntimeError(f"stages wait for each other: {[str(actions[0]) for actions in todo if actions]}")
    return lanes


def _source(
    schedules: Sequence[Schedule], stage: int, action: Action, micro_batches: int
) -> tuple[Kind, int, int] | None:
    """What an action waits for besides the stage's own order: kind, stage and index of another action."""
    last = len(schedules) - 1
    if action.kind is Kind.FORWARD:
        return (Kind.FORWARD, stage - 1, action.index) if stage else None
    if action.kind is Kind.BACKWARD:
        return (Kind.BACKWARD, stage + 1, action.index) if stage < last else None
    if stage == 0 or schedules[stage].steps_ahead(action.index):
        return None
    return Kind.BACKWARD, 0, (action.index + 1) * micro_batches - 1  # the last part of the norm over all stages


def steady_state(lanes: Sequence[Sequence[Span]], micro_batches: int, first: int, last: int) -> tuple[float, float]:
    """Time per mini-batch, and utilisation of the busiest stage, from mini-batch ``first`` to mini-batch ``last``."""
    ends = {span.index: span.end for span in lanes[0] if span.kind is Kind.BACKWARD}
    start, end = (ends[(t + 1) * micro_batches - 1] for t in (first, last))
    return (end - start) / (last - first), max(busy_share(list(lane), start, end) for lane in lanes)


def ideal_milliseconds(schedules: Sequence[Schedule], micro_batches: int, forward: float, backward: float) -> float:
    """Time per mini-batch without overheads and messages."""
    lengths = {Kind.FORWARD: forward, Kind.BACKWARD: backward}
    lanes = simulate(schedules, 8, micro_batches, lambda kind, stage, k: lengths[kind])
    return steady_state(lanes, micro_batches, 3, 6)[0]
