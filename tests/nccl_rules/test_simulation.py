"""No order of waits, and no way in which streams share hardware queues, makes the pipeline hang; what would is found.

The cases of :func:`sizes` are all up to eight stages and sixteen micro-batches.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator

import pytest

from lightning_asyncpp.pipeline.schedule import largest_lookahead
from tests.nccl_rules.devices import Clock, Device, Meeting, Operation, Thread
from tests.nccl_rules.simulation import (
    BACKWARD_TIME, FORWARD_TIME, REPLICAS, STREAMS, Case, Direction, Simulation, Waits,
)  # fmt: skip

MOST_STAGES, MOST_MICRO_BATCHES = 8, 16

WAITS: dict[str, Waits] = {
    "never": lambda random, k: False,
    "at every moment": lambda random, k: True,
    "at random moments": lambda random, k: random.random() < 0.1,
    "together": lambda random, k: k % 5 == 3,
}
QUEUES: dict[str, Callable[[str], str]] = {"own queues": lambda stream: stream, "one queue": lambda stream: "shared"}


def sharing(pair: tuple[str, ...]) -> Callable[[str], str]:
    return lambda stream: "shared" if stream in pair else stream


def sizes(stages: int, replicas: int = 1) -> Iterator[Case]:
    for micro_batches in range(stages, MOST_MICRO_BATCHES + 1):
        for lookahead in sorted({0, largest_lookahead(stages, micro_batches, replicas)}):
            yield Case(stages, micro_batches, lookahead, (2, 1), replicas)


@pytest.fixture(autouse=True)
def _without_collecting() -> Iterator[None]:
    """Half of the time would go into looking for garbage among what is in use."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("waits", WAITS)
@pytest.mark.parametrize("queues", QUEUES)
@pytest.mark.parametrize("stages", range(2, MOST_STAGES + 1))
def test_no_size_hangs(stages: int, queues: str, waits: str) -> None:
    for case in sizes(stages):
        assert not Simulation(case, QUEUES[queues], WAITS[waits], seed=case.micro_batches).run(), case


@pytest.mark.parametrize("waits", WAITS)
@pytest.mark.parametrize("pair", itertools.combinations(STREAMS, 2), ids="-".join)
def test_no_pair_of_streams_hangs(pair: tuple[str, str], waits: str) -> None:
    for stages in range(2, MOST_STAGES + 1):
        for case in sizes(stages):
            assert not Simulation(case, sharing(pair), WAITS[waits], seed=case.micro_batches).run(), case
