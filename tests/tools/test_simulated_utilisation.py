"""What the schedules are worth where nothing is measured: a change that makes stages wait fails here, on any machine.

The times are those of the sleeping benchmark (20 + 40 ms), with a message that takes 1.2 ms, over a link of 10 ms, and
with work that takes longer at one time than at another.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lightning_asyncpp.core import schedule as schedules
from lightning_asyncpp.core.schedule import Kind, Schedule, StalenessRule
from lightning_asyncpp.core.simulation import Duration, simulate
from lightning_asyncpp.tools.bench.harness.stage_layers import jitter_factor
from tests.tools.steady import steady_utilisation

MINI_BATCHES = 12
# stages, micro-batches, lookahead, delay: utilisation without a delay of messages, with 1.2 ms, 10 ms, and with jitter
KNOWN = {
    (2, 2, 1, 1): (1.000, 1.000, 1.000, 1.000),
    (4, 4, 1, 1): (1.000, 0.988, 0.815, 0.91),
    (8, 8, 0, 1): (1.000, 0.965, 0.772, 0.86),
    (8, 8, 1, 1): (1.000, 0.966, 0.778, 0.87),
    (8, 8, 0, 0): (0.533, 0.514, 0.413, 0.51),
    (8, 16, 7, 1): (1.000, 1.000, 1.000, 0.98),
    (32, 32, 1, 1): (1.000, 0.962, 0.755, 0.83),
}
CONDITIONS = ((0.0, 0.0), (1.2, 0.0), (10.0, 0.0), (0.0, 0.2))


def simulated(shape: tuple[int, int, int, int], hop: float, sigma: float) -> float:
    stages, micro_batches, lookahead, delay = shape

    def lasting(milliseconds: float, kind: Kind) -> Duration:
        return lambda stage, index: milliseconds * jitter_factor(sigma, 0, stage, index, kind)

    lanes = simulate(
        [Schedule(stage, stages, lookahead, StalenessRule(delay)) for stage in range(stages)],
        MINI_BATCHES,
        micro_batches,
        lasting(20.0, Kind.FORWARD),
        lasting(40.0, Kind.BACKWARD),
        hop,
    )
    return steady_utilisation(lanes, micro_batches, 3, MINI_BATCHES - 2)[1]


def check(shape: tuple[int, int, int, int]) -> None:
    for (hop, sigma), known in zip(CONDITIONS, KNOWN[shape]):
        found = simulated(shape, hop, sigma)
        assert found >= 0.98 * known, f"{shape}, hop {hop} ms, jitter {sigma}: {found:.3f} where it was {known:.3f}"


SLOW = (32, 32, 1, 1)


@pytest.mark.parametrize(
    "shape", [pytest.param(shape, marks=pytest.mark.slow) if shape == SLOW else shape for shape in KNOWN], ids=str
)
def test_no_schedule_loses_utilisation(shape: tuple[int, int, int, int]) -> None:
    check(shape)


@pytest.mark.parametrize(
    "worse",
    [
        pytest.param(lambda plain, s, p, c: plain(s | 1, p, c), id="pairs of stages in step"),
        pytest.param(lambda plain, s, p, c: plain(s, p, c) // 2, id="half the lead"),
    ],
)
def test_the_loss_of_a_fifth_is_seen(worse: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    plain, shape = schedules.depth, (8, 8, 1, 1)
    monkeypatch.setattr(schedules, "depth", lambda s, p, c: worse(plain, s, p, c))
    assert simulated(shape, 1.2, 0.0) < 0.8 * KNOWN[shape][1]
    with pytest.raises(AssertionError, match="where it was"):
        check(shape)
