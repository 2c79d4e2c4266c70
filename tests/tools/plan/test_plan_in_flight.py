"""What a schedule keeps alive, against what can be counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_asyncpp.core.schedule import Schedule, Slack, StalenessRule
from lightning_asyncpp.tools.plan.fake_tensors import Reading
from lightning_asyncpp.tools.plan.in_flight import StageSchedule, peak_of
from lightning_asyncpp.tools.plan.stage_run import Profile

KEPT, GRADIENTS = 1000, 10
PROFILE = Profile(
    weights=100, versions=100, buffers=3, gradients=GRADIENTS, optimizer=200, correction=100,
    forward=Reading(KEPT, KEPT + 5), backward=Reading(GRADIENTS - KEPT, 20), backward_again=Reading(-KEPT, 30),
    update=Reading(-GRADIENTS, 40),
)  # fmt: skip
CONSTANT = 100 + 100 + 3 + 200 + 100


def at(stage: int, num_stages: int, m: int, lookahead: int = 0, delay: int = 1, **others: int) -> StageSchedule:
    return StageSchedule(Schedule(stage, num_stages, lookahead, StalenessRule(delay)), m, **others)


@pytest.mark.parametrize("lookahead", [0, 1, 3])
@pytest.mark.parametrize("stage", range(4))
def test_flights_are_those_of_the_schedule(stage: int, lookahead: int) -> None:
    where = at(stage, 4, 8, lookahead)
    memory = peak_of(where, [PROFILE] * 8, 0)
    flights = where.schedule.depth + 1
    assert (memory.in_flight, memory.activations, memory.during) == (flights, flights * KEPT, "backward")
    assert memory.working == 30
    # The set that is summed; on a stage with flights, beside the one that waits for its update.
    assert memory.gradients == GRADIENTS * 2
    assert memory.total == CONSTANT + memory.gradients + memory.activations + 30


@pytest.mark.parametrize("stage", range(4))
def test_a_flush_leaves_one_set_of_gradients(stage: int) -> None:
    memory = peak_of(at(stage, 4, 8, delay=0), [PROFILE] * 8, 0)
    assert memory.in_flight == 4 - stage
    assert memory.gradients == GRADIENTS


@pytest.mark.parametrize(("slack", "sets"), [(0, 1), (1, 1), (2, 2), (9, 2), ("exact", 1)])
def test_the_least_staleness_needs_a_second_set_of_gradients_if_updates_wait(slack: Slack, sets: int) -> None:
    """At its fullest moment, before a backward: a forward after the end of a gradient there is none of the next yet."""
    least = StageSchedule(Schedule(1, 4, staleness="least", slack=slack), 8)
    memory = peak_of(least, [PROFILE] * 8, 0)
    assert memory.gradients == sets * GRADIENTS
    assert (memory.in_flight, memory.activations) == (3, 3 * KEPT)


def test_an_update_within_a_batch_is_made_beside_the_micro_batches_in_flight() -> None:
    costly = replace(PROFILE, update=Reading(-GRADIENTS, 5000))
    memory = peak_of(StageSchedule(Schedule(1, 4, staleness="least"), 8), [costly] * 8, 0)
    assert (memory.during, memory.in_flight, memory.working) == ("update", 2, 5000)
    assert memory.gradients == GRADIENTS


def test_a_costly_update_is_the_peak() -> None:
    costly = replace(PROFILE, update=Reading(-GRADIENTS, 5000))
    memory = peak_of(at(1, 2, 4), [costly] * 4, 0)
    assert (memory.during, memory.in_flight, memory.working) == ("update", 0, 5000)
    assert memory.gradients == 2 * GRADIENTS  # that of the mini-batch before, and the newest, which is whole


def test_accumulated_batches_share_their_gradients() -> None:
    one, two = (peak_of(at(0, 2, 4, accumulated=n), [PROFILE] * 4, 0) for n in (1, 2))
    assert one.total == two.total


def test_uneven_micro_batches_and_empty_slots() -> None:
    large = replace(PROFILE, forward=Reading(3 * KEPT, 3 * KEPT))
    assert peak_of(at(0, 2, 3), [large, PROFILE, PROFILE], 0).activations == 3 * KEPT + KEPT
    assert peak_of(at(0, 2, 3), [PROFILE], 0).activations == KEPT


def test_batches_in_flight_are_kept() -> None:
    assert peak_of(at(0, 2, 4), [PROFILE] * 4, 7).batch == 14
    assert peak_of(at(1, 2, 4), [PROFILE] * 4, 7).batch == 7
    assert peak_of(at(0, 2, 4, delay=0), [PROFILE] * 4, 7).batch == 7


def test_replicas_pack_their_gradients() -> None:
    reduced = replace(PROFILE, backward_reduced=Reading(0, 3000))
    memory = peak_of(at(0, 2, 4), [reduced] * 4, 0)
    assert memory.working == 3000
    last = peak_of(at(1, 2, 4), [replace(PROFILE, backward_reduced=Reading(0, 3000), gradients=5000)] * 4, 0)
    assert (last.during, last.working) == ("reduction", 5000)  # its mini-batch ends before it is known to be whole


def test_a_shared_gradient_waits_on_the_host() -> None:
    tied = replace(PROFILE, tied=7, update=Reading(-GRADIENTS, 9000))
    memory = peak_of(at(0, 2, 4), [tied] * 4, 0)
    assert (memory.during, memory.messages) == ("update", 7)  # the next mini-batch's may be there already
    on_device = replace(at(0, 2, 4), on_host=False)
    assert peak_of(on_device, [tied] * 4, 0).messages == 0
