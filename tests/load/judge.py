"""Whether a long run was steady: nothing grew, and its steps take no longer than those of a run that has just begun."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tests.load.probe import Sample

WARM_UP = 0.1
MOST_GROWTH = 1.0  # MiB in a run; an allocator takes a few hundred KiB at a time
MOST_SLOWER = 0.03


@dataclass(frozen=True)
class Verdict:
    """What a run of several ranks came to.

    Attributes:
        growth: of the memory of each rank, MiB in 10,000 steps: the median of the slopes between all pairs of samples.
        counts: name -> for each rank, its largest value in the first fifth, and its largest in the last one.
        steps: over which memory was watched.
        slower: what is measured of a step -> how much more of it the old training takes than a new one that takes
            turns with it, as a ratio: see :func:`compare`.
    """

    growth: list[float]
    counts: dict[str, list[tuple[int, int]]]
    slower: dict[str, Ratio]
    steps: int

    def problems(self) -> list[str]:
        """What is not steady."""
        found = [
            f"rank {rank}: memory grows by {growth:.2f} MiB in 10,000 steps"
            for rank, growth in enumerate(self.growth)
            if growth * self.steps / 10_000 > MOST_GROWTH
        ]
        found += count_problems(self.counts)
        return found + [
            f"a step takes {ratio.median:.3f} times the {name} of one in a new training"
            for name, ratio in self.slower.items()
            if ratio.low > 1 + MOST_SLOWER
        ]


class Ratio(NamedTuple):
    """The median of some ratios, and the ends of an interval in which it lies with a probability of 95 %."""

    low: float
    median: float
    high: float


def judge(old: Sequence[Sequence[Sample]], new: Sequence[Sequence[Sample]] = (), before: int | None = None) -> Verdict:
    """Compare the first and the last fifth of what each rank saw after its warm-up, and its laps with those of another.

    Args:
        old: the samples of each rank of a long training.
        new: those of a short one that took turns with it; one sample is a lap.
        before: steps of the long one before they took turns.
    """
    long = [[s for s in samples if before is None or s.step <= before] for samples in old]
    long = [samples[round(WARM_UP * len(samples)) :] for samples in long]
    laps = [[s for s in samples if before is not None and s.step > before] for samples in old]
    count = min((len(samples) for samples in laps), default=0)
    recent = [samples[len(samples) - count :] for samples in new]
    return Verdict(
        [slope([s.step for s in samples], [s.resident for s in samples]) * 10_000 / 2**20 for samples in long],
        counts(long),
        {"CPU time": compare(laps, recent, "cpu"), "time": compare(laps, recent, "wall")} if new else {},
        long[0][-1].step - long[0][0].step,
    )


def compare(old: Sequence[Sequence[Sample]], new: Sequence[Sequence[Sample]], name: str) -> Ratio:
    """Lap by lap, the sum over ranks of a step of ``old`` as a share of that of ``new``, which ran just after it.

    Whatever else the machine does in that minute slows both of them.
    """
    sums = [[sum(getattr(s, name) for s in lap) for lap in zip(*ranks)] for ranks in (old, new)]
    ratios = sorted(a / b for a, b in zip(*sums, strict=True))
    # The sign test's interval for a median: binomial, approximated.
    outside = max(0, math.floor(len(ratios) / 2 - math.sqrt(len(ratios))))
    return Ratio(ratios[outside], statistics.median(ratios), ratios[-1 - outside])


def counts(ranks: Sequence[Sequence[Sample]]) -> dict[str, list[tuple[int, int]]]:
    """Name -> for each rank, what it had most of in its first fifth and in its last one."""
    names = ("threads", "python_threads", "files", "objects", "works")
    return {
        name: [tuple(max(getattr(s, name) for s in part) for part in _fifths(samples)) for samples in ranks]  # type: ignore[misc]
        for name in names
    }


def count_problems(counts: dict[str, list[tuple[int, int]]]) -> list[str]:
    """What there is more of at the end than at the start."""
    # Dictionaries of what was logged or cached once are a few dozen objects; a leak per step would be thousands.
    slack = {"objects": 200}
    return [
        f"rank {rank}: {name} grew from {first} to {last}"
        for name, ends in counts.items()
        for rank, (first, last) in enumerate(ends)
        if last > first + slack.get(name, 0)
    ]


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Theil and Sen's: the median of the slopes between all pairs of points, which no few outliers move."""
    pairs = [(i, j) for i in range(len(x)) for j in range(i + 1, len(x))]
    return statistics.median((y[j] - y[i]) / (x[j] - x[i]) for i, j in pairs)


def _fifths(samples: Sequence[Sample]) -> tuple[Sequence[Sample], Sequence[Sample]]:
    size = max(1, len(samples) // 5)
    return samples[:size], samples[-size:]
