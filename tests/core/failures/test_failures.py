"""Real processes that fail: every rank ends, soon, and says why."""

from __future__ import annotations

import re

import pytest

from tests.helpers import failing as failing_cases
from tests.helpers.failing import Outcome, run_ranks

STAGES = 3  # rank 2 is the first stage, rank 0 the last
SOON = 20.0


def errors(outcomes: list[Outcome]) -> list[str]:
    assert all(outcome.seconds < SOON for outcome in outcomes)
    return [outcome.error for outcome in outcomes]


@pytest.mark.parametrize("stage", range(STAGES))
def test_an_error_at_the_first_microbatch_is_quoted_on_every_rank(stage: int) -> None:
    outcomes = run_ranks(failing_cases.error_of_user, STAGES, stage, 0)
    rank = STAGES - 1 - stage
    assert errors(outcomes) == ["ValueError" if r == rank else "OtherStageFailedError" for r in range(STAGES)]
    for r, outcome in enumerate(outcomes):
        quoted = f"rank {rank} (stage {stage}): ValueError: the user's own mistake"
        assert outcome.text == ("the user's own mistake" if r == rank else quoted)


@pytest.mark.parametrize("stage", range(STAGES))
def test_an_error_later_on_ends_every_rank(stage: int) -> None:
    outcomes = run_ranks(failing_cases.error_of_user, STAGES, stage, 2)
    rank = STAGES - 1 - stage
    assert errors(outcomes) == ["ValueError" if r == rank else "PeerLostError" for r in range(STAGES)]


@pytest.mark.parametrize(
    ("scenario", "text"),
    [
        (failing_cases.model_called_twice, "the step ended after calling twice self.model(...)"),
        (failing_cases.layer_returns_text, "a layer at a cut returned str"),
    ],
    ids=["last stage", "first stage"],
)
def test_a_wrong_configuration_reads_the_same_on_every_rank(scenario: object, text: str) -> None:
    outcomes = run_ranks(scenario, STAGES)  # type: ignore[arg-type]
    assert errors(outcomes) == ["ConfigurationError"] * STAGES
    assert {outcome.text for outcome in outcomes} == {outcomes[0].text}
    assert outcomes[0].text.startswith(text)


def test_different_batches_are_told_apart_at_the_first_microbatch() -> None:
    outcomes = run_ranks(failing_cases.other_batch, STAGES, 0)
    assert errors(outcomes) == ["BatchMismatchError", "OtherStageFailedError", "OtherStageFailedError"]
    assert "the first and the last stage were given different batches (microbatch 0: " in outcomes[0].text
    assert "look at the data loader's shuffling, its seed and its sampler" in outcomes[0].text
    assert all("rank 0 (stage 2): BatchMismatchError: the first and" in outcome.text for outcome in outcomes[1:])


def test_different_batches_are_told_apart_later() -> None:
    outcomes = run_ranks(failing_cases.other_batch, STAGES, 2)
    assert errors(outcomes) == ["BatchMismatchError", "PeerLostError", "PeerLostError"]
    assert "(microbatch 6: their shapes or contents differ)" in outcomes[0].text


@pytest.mark.parametrize(
    ("stage", "how"),
    [
        (0, "an empty slot on the first stage, samples on the last"),
        (2, "samples on the first stage, an empty slot on the last"),
    ],
)
def test_a_batch_that_is_shorter_on_one_stage(stage: int, how: str) -> None:
    outcomes = run_ranks(failing_cases.shorter_batch, STAGES, stage, True)
    assert errors(outcomes)[0] == "BatchMismatchError"
    assert f"(microbatch 2: {how})" in outcomes[0].text
    outcomes = run_ranks(failing_cases.shorter_batch, STAGES, stage, False)
    assert errors(outcomes)[0] == "BatchMismatchError"
    assert "(microbatch 0: their shapes or contents differ)" in outcomes[0].text


@pytest.mark.parametrize("evaluates", [False, True], ids=["training", "evaluation"])
@pytest.mark.parametrize("stage", range(STAGES))
def test_a_stage_with_a_batch_less_keeps_no_other_waiting(stage: int, evaluates: bool) -> None:
    outcomes = run_ranks(failing_cases.ends_early, STAGES, stage, evaluates)
    early, later = STAGES - 1 - stage, STAGES - 2 - stage
    told = {"PeerLostError", "StageBeforeFailedError" if evaluates else "PeerLostError"}
    assert set(errors(outcomes)) <= {"ProtocolError", *told}
    if stage > 0:
        assert outcomes[early].error == "ProtocolError"
        expected = f"this rank has ended before microbatch 9 .* while rank {early + 1} "
        assert re.match(rf"{expected}\(stage {stage - 1}\) has a further batch", outcomes[early].text)
    if stage < STAGES - 1:
        assert outcomes[later].error == "ProtocolError"
        expected = rf"rank {early} \(stage {stage}\) has ended before microbatch 9 "
        assert re.match(rf"{expected}.* while this rank has a further batch", outcomes[later].text)


@pytest.mark.parametrize("rank", range(STAGES))
def test_the_others_end_when_a_rank_is_killed(rank: int) -> None:
    outcomes = run_ranks(failing_cases.killed, STAGES, rank)
    assert errors(outcomes) == ["killed" if r == rank else "PeerLostError" for r in range(STAGES)]


def test_the_other_replica_ends_too() -> None:
    outcomes = run_ranks(failing_cases.killed, 4, 1)
    assert errors(outcomes) == ["PeerLostError", "killed", "PeerLostError", "PeerLostError"]


def test_a_batch_after_a_failure_fails_again() -> None:
    outcomes = run_ranks(failing_cases.killed_and_tried_again, 2, timeout=8.0)
    assert errors(outcomes) == ["PeerLostError", "killed"]


@pytest.mark.parametrize("flag", ["interrupted", "finished"])
@pytest.mark.parametrize("rank", range(STAGES))
def test_a_request_to_stop_is_agreed_at_the_same_update(rank: int, flag: str) -> None:
    outcomes = run_ranks(failing_cases.stopped, STAGES, rank, flag)
    assert errors(outcomes) == [""] * STAGES
    told = outcomes[0].value
    assert all(outcome.value == told for outcome in outcomes)
    assert told[0] in (1, 2), "the next control message should carry it"
    assert told == list(range(told[0], 5))


@pytest.mark.parametrize(
    ("world_size", "replica"), [(1, 0), (3, 0), pytest.param(4, 0, marks=pytest.mark.slow), (4, 1)]
)
def test_a_gradient_that_is_no_number_stops_every_rank_before_its_update(world_size: int, replica: int) -> None:
    outcomes = run_ranks(failing_cases.not_a_number, world_size, replica)
    assert errors(outcomes) == [""] * world_size
    for outcome in outcomes:
        kind, text, batch, newest = outcome.value
        assert (kind, batch, newest) == ("NonFiniteGradientError", 3, 2)
        assert text.startswith("the gradient of mini-batch 2 holds NaN or Inf (")


@pytest.mark.parametrize("stage", range(STAGES))
def test_a_gradient_that_is_no_number_leaves_the_weights_of_who_does_not_wait_to_know_it_numbers(stage: int) -> None:
    outcomes = run_ranks(failing_cases.not_a_number_that_the_device_alone_knows, STAGES, stage)
    assert errors(outcomes) == [""] * STAGES
    for rank, outcome in enumerate(outcomes):
        where = "on this stage" if STAGES - 1 - rank == stage else "not on this stage"
        text, finite = outcome.value
        assert text.startswith(f"3 the gradient of mini-batch 2 holds NaN or Inf ({where}")
        assert finite


@pytest.mark.parametrize("stage", range(STAGES))
def test_the_stage_of_a_gradient_that_is_no_number_names_its_parameter(stage: int) -> None:
    outcomes = run_ranks(failing_cases.not_a_number_on_one_stage, STAGES, stage)
    assert errors(outcomes) == [""] * STAGES
    first_parameter = ("0.weight", "4.weight", "7.experts")[stage]
    for rank, outcome in enumerate(outcomes):
        kind, text, newest = outcome.value
        assert (kind, newest) == ("NonFiniteGradientError", 2)
        here = STAGES - 1 - rank
        where = f"on this stage ({here}): {first_parameter}" if here == stage else f"not on this stage ({here})"
        assert text.startswith(f"the gradient of mini-batch 2 holds NaN or Inf ({where})")
