"""Settings are resolved against the number of processes, and what cannot run is refused with its mend."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_asyncpp.core.schedule import depth, largest_lookahead
from lightning_asyncpp.core.settings import PipelineSettings
from lightning_asyncpp.errors import ConfigurationError

REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"microbatches": 0}, 2, "microbatches=0 must be at least 1"),
    ({"microbatches": "4"}, 2, "microbatches='4' must be a whole number"),
    ({"lookahead": -1}, 2, "lookahead=-1 must be 0 or more"),
    ({"nonfinite_gradients": "ignore"}, 2, "must be 'stop' or 'skip'"),
    ({"data_parallel_size": 3}, 4, "devices=4 is not divisible by data_parallel_size=3"),
    ({"microbatches": 3}, 4, "use microbatches >= 4, or strategy 'sync_pipeline'"),
    (
        {"staleness": "least", "slack": 1, "nonfinite_gradients": "skip"},
        2,
        "nonfinite_gradients='skip' could not skip",
    ),
    ({"staleness": "none"}, 2, "must be 'uniform' or 'least'"),
    ({"staleness": "least", "delay": 0}, 2, "has no meaning without a delay"),
    ({"staleness": "least", "slack": 1.5}, 2, "slack=1.5 must be a number of microbatches, 0 or more, or 'exact'"),
    ({"slack": "exact"}, 2, "has a meaning only with staleness='least'"),
    ({"microbatches": -1, "lookahead": -2}, 4, "2 problems:"),
    ({"delay": 2}, 2, "delay"),
]


@pytest.mark.parametrize(("arguments", "world_size", "message"), REFUSED, ids=lambda v: str(v)[:40])
def test_refused_settings(arguments: dict[str, Any], world_size: int, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        PipelineSettings(**arguments).resolved(world_size)
    assert message in str(caught.value)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_the_mend_in_a_message_works(num_stages: int, num_replicas: int) -> None:
    world_size = num_stages * num_replicas
    for microbatches in range(num_stages, 2 * num_stages + 2):
        for lookahead in range(3 * num_stages + 1):
            settings = PipelineSettings(microbatches, lookahead, num_replicas)
            resolved, problems = settings.resolve(world_size)
            fits = lookahead <= largest_lookahead(num_stages, microbatches, num_replicas)
            assert (resolved is not None) == fits == (not problems)
            if not fits:
                mended = int(problems[0].rpartition(">= ")[2])
                assert PipelineSettings(mended, lookahead, num_replicas).resolve(world_size)[1] == []
                assert PipelineSettings(mended - 1, lookahead, num_replicas).resolve(world_size)[1]


@pytest.mark.parametrize(
    ("arguments", "world_size", "microbatches", "lookahead"),
    [
        ({}, 1, 1, 0),
        ({}, 4, 8, 1),
        ({"microbatches": 4, "data_parallel_size": 2}, 8, 4, 0),  # one is left for the reduction to hide in
        ({"data_parallel_size": 2, "microbatches": 5}, 8, 5, 1),
        ({"delay": 0}, 4, 8, 0),
        ({"delay": 0, "microbatches": 1}, 4, 1, 0),
        ({"microbatches": 8, "lookahead": 3}, 4, 8, 3),
        ({"microbatches": 8, "lookahead": 0}, 4, 8, 0),
        ({"microbatches": 8, "staleness": "least"}, 4, 8, 0),  # more would cost freshness
        ({"microbatches": 8, "staleness": "least", "lookahead": 1}, 4, 8, 1),
    ],
)
def test_defaults(arguments: dict[str, Any], world_size: int, microbatches: int, lookahead: int) -> None:
    resolved = PipelineSettings(**arguments).resolved(world_size)
    assert (resolved.microbatches, resolved.lookahead) == (microbatches, lookahead)
    assert resolved.num_stages * resolved.data_parallel_size == world_size
    if resolved.delay:
        assert depth(0, resolved.num_stages, lookahead) <= microbatches


@pytest.mark.parametrize(
    ("arguments", "ahead"),
    [
        ({}, [False, False, False]),
        ({"staleness": "least"}, [True, True, True]),
        ({"staleness": "least", "slack": 2}, [True, True, True]),
        ({"staleness": "least", "slack": "exact"}, [False, False, False]),
    ],
    ids=str,
)
def test_stages_that_step_ahead_of_the_others_begin_with_a_mini_batch_without_delay(
    arguments: dict[str, Any], ahead: list[bool]
) -> None:
    """They clip by the norm of the mini-batch before, which the very first has not."""
    settings = PipelineSettings(**arguments)
    resolved, start = settings.resolved(3), int(any(ahead))
    assert [resolved.schedule(stage).steps_ahead(start) for stage in range(3)] == ahead
    assert not any(resolved.schedule(stage).steps_ahead(0) for stage in range(3))
    assert resolved.synchronous_start == start
    twin = settings.with_delay(0).resolved(3)
    assert (twin.staleness, twin.slack, twin.synchronous_start) == ("uniform", 0, 0)
    assert not any(twin.schedule(stage).steps_ahead(start) for stage in range(3))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "8 microbatches; gradients one update old"),
        ({"delay": 0}, "8 microbatches; gradients fresh"),
        ({"staleness": "least", "lookahead": 4}, "8 microbatches; gradients up to 75% old, clipped by last norm"),
        ({"staleness": "least", "slack": 1}, "8 microbatches; gradients up to 38% old, clipped by last norm"),
        ({"staleness": "least", "slack": "exact"}, "8 microbatches; gradients up to 25% old"),
    ],
    ids=str,
)
def test_the_log_says_how_old_gradients_are(arguments: dict[str, Any], text: str) -> None:
    assert PipelineSettings(microbatches=8, **arguments).resolved(3).describe(clips=True) == text
    assert PipelineSettings(microbatches=8, **arguments).resolved(3).describe() == text.partition(", ")[0]
