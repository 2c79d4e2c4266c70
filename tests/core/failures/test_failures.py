"""If a rank fails, every process ends soon and reports the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers import failing
from tests.helpers.failing import Outcome, run_ranks

STAGES = 3  # rank 2 is the first stage, rank 1 the middle one, rank 0 the last
SOON = 20.0


def errors(outcomes: list[Outcome]) -> list[str]:
    assert all(outcome.seconds < SOON for outcome in outcomes)
    return [outcome.error for outcome in outcomes]


def test_an_error_at_the_first_microbatch_is_quoted_on_every_rank() -> None:
    outcomes = run_ranks(failing.error_of_user, STAGES, 1, 0)
    assert errors(outcomes) == ["OtherStageFailedError", "ValueError", "OtherStageFailedError"]
    quoted = "rank 1 (stage 1): ValueError: the user's own mistake"
    assert [outcome.text for outcome in outcomes] == [quoted, "the user's own mistake", quoted]


@pytest.mark.parametrize(
    ("scenario", "arguments", "found"),
    [
        (failing.other_batch, (2,), "(microbatch 6: their shapes or contents differ)"),
        (failing.shorter_batch, (0,), "(microbatch 0: their shapes or contents differ)"),
    ],
    ids=["later", "shorter"],
)
def test_different_batches_are_told_apart(scenario: Callable[..., Any], arguments: tuple[int], found: str) -> None:
    outcomes = run_ranks(scenario, STAGES, *arguments)
    assert errors(outcomes)[0] == "BatchMismatchError"
    assert "the first and the last stage were given different batches" in outcomes[0].text
    assert found in outcomes[0].text


def test_a_stage_with_a_batch_less_in_an_evaluation_keeps_no_other_waiting() -> None:
    outcomes = run_ranks(failing.ends_early, STAGES, 1)
    assert errors(outcomes)[:2] == ["ProtocolError"] * 2
    assert "rank 1 (stage 1) has ended before microbatch 9 " in outcomes[0].text
    assert "rank 2 (stage 0) has a further batch" in outcomes[1].text


@pytest.mark.parametrize("flag", ["interrupted", "finished"])
def test_a_request_to_stop_is_agreed_at_the_same_update(flag: str) -> None:
    outcomes = run_ranks(failing.stopped, STAGES, 1, flag)
    assert errors(outcomes) == [""] * STAGES
    told = outcomes[0].value
    assert all(outcome.value == told for outcome in outcomes)
    assert told[0] in (1, 2), "the next control message should carry it"
    assert told == list(range(told[0], 5))


@pytest.mark.parametrize(
    ("world_size", "late"), [(3, False), (3, True), (4, False)], ids=["stages", "known late", "replicas"]
)
def test_a_gradient_that_is_no_number_stops_every_rank_before_its_update(world_size: int, late: bool) -> None:
    outcomes = run_ranks(failing.not_a_number, world_size, late)
    assert errors(outcomes) == [""] * world_size
    stages = 2 if world_size == 4 else STAGES
    for rank, outcome in enumerate(outcomes):
        stage = stages - 1 - rank % stages
        index, text, is_finite = outcome.value
        where = f"on this stage ({stage}): 0.weight" if stage == 0 else f"not on this stage ({stage})"
        assert text.startswith(f"the gradient of mini-batch 2 holds NaN or Inf ({where}")
        assert (index, is_finite) == (3, True), "weights stay numbers"
