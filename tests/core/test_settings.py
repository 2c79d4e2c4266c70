"""Settings are resolved for a number of processes, and settings that cannot run are refused with a remedy."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_asyncpp.core.schedule import depth, largest_lookahead
from lightning_asyncpp.core.settings import PipelineSettings
from lightning_asyncpp.errors import ConfigurationError

REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"microbatches": 0}, 2, "microbatches=0 must be at least 1"),
    ({"lookahead": -1}, 2, "lookahead=-1 must be 0 or more"),
    ({"nonfinite_gradients": "ignore"}, 2, "must be 'stop' or 'skip'"),
    ({"data_parallel_size": 3}, 4, "devices=4 is not divisible by data_parallel_size=3"),
    ({"microbatches": 3}, 4, "use microbatches >= 4, or strategy 'sync_pipeline'"),
    ({"staleness": "least", "slack": 1, "nonfinite_gradients": "skip"}, 2, "nonfinite_gradients='skip' could not skip"),
    ({"staleness": "least", "delay": 0}, 2, "has no meaning without a delay"),
    ({"staleness": "least", "slack": 1.5}, 2, "slack=1.5 must be a number of microbatches, 0 or more, or 'exact'"),
    ({"synchronous_start": -1}, 2, "synchronous_start=-1 must be a number of updates, 0 or more"),
    ({"synchronous_start": 9, "delay": 0}, 2, "synchronous_start=9 has no meaning without a delay"),
    ({"slack": "exact"}, 2, "has a meaning only with staleness='least'"),
    ({"microbatches": -1, "lookahead": -2}, 4, "2 problems:"),
]


@pytest.mark.parametrize(("arguments", "world_size", "message"), REFUSED, ids=lambda v: str(v)[:40])
def test_refused_settings(arguments: dict[str, Any], world_size: int, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        PipelineSettings(**arguments).resolved(world_size)
    assert message in str(caught.value)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_the_fix_in_a_message_works(num_stages: int, num_replicas: int) -> None:
    world_size = num_stages * num_replicas
    for microbatches in range(num_stages, 2 * num_stages + 2):
        for lookahead in range(3 * num_stages + 1):
            settings = PipelineSettings(microbatches, lookahead, num_replicas)
            resolved, problems = settings.resolve(world_size)
            fits = lookahead <= largest_lookahead(num_stages, microbatches, num_replicas)
            assert (resolved is not None) == fits == (not problems)
            if not fits:
                fixed = int(problems[0].rpartition(">= ")[2])
                assert PipelineSettings(fixed, lookahead, num_replicas).resolve(world_size)[1] == []
                assert PipelineSettings(fixed - 1, lookahead, num_replicas).resolve(world_size)[1]


@pytest.mark.parametrize(
    ("arguments", "world_size", "microbatches", "lookahead"),
    [
        ({}, 1, 1, 0),
        ({}, 4, 8, 1),
        ({"microbatches": 4, "data_parallel_size": 2}, 8, 4, 0),  # one microbatch is left to overlap with the reduction
        ({"data_parallel_size": 2, "microbatches": 5}, 8, 5, 1),
        ({"delay": 0, "microbatches": 1}, 4, 1, 0),
        ({"microbatches": 8, "lookahead": 3}, 4, 8, 3),
        ({"microbatches": 8, "staleness": "least"}, 4, 8, 0),  # a larger one would make gradients older
    ],
)
def test_defaults(arguments: dict[str, Any], world_size: int, microbatches: int, lookahead: int) -> None:
    resolved = PipelineSettings(**arguments).resolved(world_size)
    assert (resolved.microbatches, resolved.lookahead) == (microbatches, lookahead)
    assert resolved.num_stages * resolved.data_parallel_size == world_size
    if resolved.delay:
        assert depth(0, resolved.num_stages, lookahead) <= microbatches


def test_the_synchronous_counterpart_has_no_least_staleness() -> None:
    twin = PipelineSettings(staleness="least", slack=2, synchronous_start=3).with_delay(0).resolved(3)
    assert (twin.staleness, twin.slack, twin.synchronous_start) == ("uniform", 0, 0)
