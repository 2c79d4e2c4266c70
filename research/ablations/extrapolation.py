"""What the gaps of short trainings, or small models, say of larger ones: a prediction written down before those run.

``python -m research.ablations.extrapolation FOLDER --until 2400 --at 4800 9600``

A gap at length T is taken to be ``a (T / T0)^-b``, of either sign, that shrinks at most with the square of the length
and does not grow, with errors that are normal, independent and equally large at all lengths. All curves of that kind
count by how well they go through the gaps of all seeds (flat priors on a and b; the error's size is integrated out), so
the interval of a prediction holds what is not known of a, b and the error, and the error of the mean of the new seeds
themselves. It does not hold that the law may be another one.

With variants such as ``0.14M`` it is sizes instead of lengths, in millions of parameters. There is no reason why a gap
should not grow with those: at most with their square root (b from -0.5 on).
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from research.ablations.lengths import length_of, size_of
from research.ablations.results import read_runs
from research.ablations.rows import Group, Row
from research.ablations.summary import NO_DELAY, Ablation

FASTEST = 2.0
SLOWEST_BY_LENGTH, SLOWEST_BY_SIZE = 0.0, -0.5
_DRAWS = 20_000
_STEPS = 201  # of b

Gaps = Mapping[float, Sequence[float]]
"""Gaps of all seeds, by length in updates, or by size in millions of parameters."""


class Prediction(NamedTuple):
    """Median of the mean gap over some seeds, and its 2.5 and 97.5 % quantiles."""

    middle: float
    low: float
    high: float


def predict(gaps: Gaps, at: float, seeds: int, slowest: float = SLOWEST_BY_LENGTH) -> Prediction:
    """Predict the mean gap of further trainings.

    Args:
        gaps: that are known, of at least two lengths or sizes, not all on one curve exactly.
        at: length or size.
        seeds: number of trainings.
        slowest: the smallest b; below 0 a gap may grow.
    """
    if len(gaps) < 2:
        raise ValueError(f"gaps of {len(gaps)} length(s) or size(s): a prediction needs two")
    points = [(known, gap) for known, ones in gaps.items() for gap in ones]
    times = torch.tensor([known for known, _ in points], dtype=torch.float64)  # (n,)
    values = torch.tensor([gap for _, gap in points], dtype=torch.float64)  # (n,)
    first = math.exp(statistics.fmean(math.log(known) for known in gaps))
    b = torch.linspace(slowest, FASTEST, _STEPS, dtype=torch.float64)  # (s,)
    shape = (times[None] / first) ** -b[:, None]  # (s, n): the curves with a = 1
    energy = (shape**2).sum(1)
    best = (shape * values).sum(1) / energy  # (s,): a of each b
    rest = ((values - best[:, None] * shape) ** 2).sum(1)  # (s,): squares that are left
    freedom = len(points) - 1
    # What is left of p(b, a, sigma | gaps) without a, and then without sigma, whose prior is 1 / sigma.
    weight = -0.5 * energy.log() - 0.5 * freedom * rest.log()
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(torch.softmax(weight, 0), _DRAWS, replacement=True, generator=generator)
    normal = torch.randn(2, _DRAWS, dtype=torch.float64, generator=generator)
    chi_squared = (torch.randn(freedom, _DRAWS, dtype=torch.float64, generator=generator) ** 2).sum(0)
    variance = rest[drawn] / chi_squared
    a = best[drawn] + normal[0] * (variance / energy[drawn]).sqrt()
    mean = a * (at / first) ** -b[drawn] + normal[1] * (variance / seeds).sqrt()
    low, middle, high = torch.quantile(mean, torch.tensor([0.025, 0.5, 0.975], dtype=torch.float64)).tolist()
    return Prediction(middle, low, high)


def gaps_of(ablation: Ablation, until: float, place: Callable[[Group], float | None]) -> dict[str, Gaps]:
    """The gaps of an ablation whose variants are lengths or sizes.

    Args:
        ablation: whose variants are named so.
        until: the largest that counts.
        place: length or size of a variant.

    Returns:
        By a name of optimizer, delay and correction, gaps of all seeds by length or size; where there are two at least.
    """
    found: dict[str, dict[float, list[float]]] = {}
    for row in ablation.results:
        known, gap = place(row.group), ablation.gap(row) if row.setting != NO_DELAY else None
        if known is not None and known <= until and gap is not None:
            found.setdefault(_name(row), {})[known] = gap.dropna().tolist()
    return {name: gaps for name, gaps in found.items() if len(gaps) > 1}


def _name(row: Row) -> str:
    return f"{row.optimizer}, delay {row.delay}, {row.correction}"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the predictions."""
    parser = argparse.ArgumentParser(prog="python -m research.ablations.extrapolation")
    parser.add_argument("folder", type=Path, help="with results.csv, of variants such as 600-updates or 0.14M")
    parser.add_argument("--until", type=float, required=True, help="what is looked at: updates or M, at most")
    parser.add_argument("--at", type=float, nargs="+", required=True, help="what is predicted: updates or M")
    parser.add_argument("--seeds", type=int, default=3, help="trainings whose mean is predicted")
    arguments = parser.parse_args(argv)
    ablation = Ablation.of(*read_runs(arguments.folder))
    by_size = any(size_of(row.group) is not None for row in ablation.results)
    place, unit = (size_of, "million parameters") if by_size else (length_of, "updates")
    slowest = SLOWEST_BY_SIZE if by_size else SLOWEST_BY_LENGTH
    for name, gaps in gaps_of(ablation, arguments.until, place).items():
        print(f"{name}, from {', '.join(f'{known:g}' for known in sorted(gaps))} {unit}:")
        for at in arguments.at:
            middle, low, high = predict(gaps, at, arguments.seeds, slowest)
            print(f"  {at:g}: {middle:+.3f}, 95 % between {low:+.3f} and {high:+.3f}")


if __name__ == "__main__":
    main()
