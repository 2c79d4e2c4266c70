from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_asyncpp.core.schedule import Kind, Schedule, Slack, StalenessRule
from lightning_asyncpp.core.simulation import DeadlockError, simulate


def schedules(stages: int, lookahead: int, delay: int) -> list[Schedule]:
    return [Schedule(stage, stages, lookahead, StalenessRule(delay)) for stage in range(stages)]


def test_too_few_microbatches_deadlock_instead_of_looping_for_ever() -> None:
    with pytest.raises(DeadlockError, match="wait for each other"):
        simulate(schedules(4, 0, 1), mini_batches=3, microbatches=1)


def test_a_message_takes_its_time_between_stages_and_for_the_update() -> None:
    lanes = simulate(schedules(2, 0, 0), mini_batches=1, microbatches=1, hop=0.5)
    spans = [[(str(span.kind.value), span.start) for span in lane] for lane in lanes]
    # Stage 0 runs F until 1. After a hop of 0.5, stage 1 runs F and B until 4.5. After another hop, stage 0 runs B
    # until 7. After a third hop, stage 1 knows that the gradient is complete.
    assert spans == [[("F", 0.0), ("B", 5.0), ("U", 7.0)], [("F", 1.5), ("B", 2.5), ("U", 7.5)]]


@pytest.mark.parametrize(("slack", "waits"), [(0, 3.0), (1, 0.0), ("exact", 3.0)])
def test_a_stage_that_steps_ahead_waits_for_its_own_gradient_alone(slack: Slack, waits: float) -> None:
    """A reduction takes three units, as a forward and its backward do; the stage waits for what is not hidden."""
    least = [replace(s, staleness="least", slack=slack, pipeline_rule=StalenessRule(1, 1)) for s in schedules(2, 0, 1)]
    plain, lanes = (simulate(least, 8, 6, reduction=reduction) for reduction in (0.0, 3.0))
    lengths = []
    for first, *_ in (plain, lanes):
        ends = {span.index: span.end for span in first if span.kind is Kind.BACKWARD}
        lengths.append((ends[41] - ends[23]) / 3)  # from the end of mini-batch 3 to that of mini-batch 6
    assert lengths == [pytest.approx(6 * 3.0), pytest.approx(6 * 3.0 + waits)]
