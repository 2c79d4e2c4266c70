from __future__ import annotations

from itertools import pairwise

import pytest

from lightning_asyncpp.pipeline.schedule import Kind, Schedule
from lightning_asyncpp.tools.ideal import DeadlockError, simulate


def schedules(stages: int, lookahead: int, delay: int) -> list[Schedule]:
    return [Schedule(stage, stages, lookahead, delay) for stage in range(stages)]


def test_a_flush_costs_the_known_bubble() -> None:
    lanes = simulate(schedules(4, 0, 0), mini_batches=3, micro_batches=4)
    assert max(span.end for lane in lanes for span in lane) == 3 * (4 + 4 - 1) * 3


def test_without_a_flush_the_steady_state_has_no_idle_time() -> None:
    lanes = simulate(schedules(4, 0, 1), mini_batches=6, micro_batches=4)
    last_stage = [span for span in lanes[3] if span.kind is not Kind.UPDATE]
    assert last_stage[-1].end - last_stage[0].start == 6 * 4 * 3


def test_a_micro_batch_visits_the_stages_in_order() -> None:
    lanes = simulate(schedules(3, 1, 1), mini_batches=2, micro_batches=4)
    for kind, order in ((Kind.FORWARD, lanes), (Kind.BACKWARD, lanes[::-1])):
        for k in range(8):
            spans = [next(s for s in lane if s.kind is kind and s.index == k) for lane in order]
            assert all(a.end <= b.start for a, b in pairwise(spans))


def test_too_few_micro_batches_deadlock_instead_of_looping_for_ever() -> None:
    with pytest.raises(DeadlockError, match="wait for each other"):
        simulate(schedules(4, 0, 1), mini_batches=3, micro_batches=1)
