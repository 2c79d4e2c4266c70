"""What a delay costs in updates: how many more it takes to the same loss.

Variants of a recipe that are named after their length, ``600-updates``, ``1200-updates``, ..., say it from the ends of
trainings. Of other trainings, their curves do:

``python -m research.ablations.lengths FOLDER --gain 1.38 --against Muon``

prints the difference in loss, the updates over those to the same loss, and how many times as fast that is, with 95 %
intervals: of each row, and, pooled, of the one delayed row that an optimizer has in each of several variants.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from research.ablations.results import read_curves, read_runs
from research.ablations.rows import Group, Row
from research.ablations.summary import NO_DELAY, Ablation, Result, difference, half_width, pooled_half_width

_DIGITS = {"loss": 4, "updates": 2, "faster": 2}


def length_of(group: Group) -> int | None:
    """Return the updates of a variant that is named after them, or None."""
    found = re.fullmatch(r"(\d+)-updates", group.variant or "")
    return int(found[1]) if found else None


def size_of(group: Group) -> float | None:
    """Return the millions of parameters of a variant that is named after them, such as ``0.14M``, or None."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)M", group.variant or "")
    return float(found[1]) if found else None


def further_updates(ablation: Ablation, row: Row) -> pd.Series | None:
    """Return, by seed, the share of updates that a row needs beyond a training without delay to its final loss.

    The losses at the ends of all trainings without delay, of the same seed, are joined by straight lines against the
    logarithm of their length, and prolonged beyond the shortest and the longest.

    Returns:
        None with fewer than two lengths without delay, or if their losses do not fall.
    """
    length = length_of(row.group)
    if length is None:
        return None
    found = {}
    for seed, loss in ablation.results[row].losses.dropna().items():
        equal = updates_to(_without_delay(ablation, row, int(str(seed))), loss)
        if equal is not None:
            found[seed] = length / equal - 1
    return pd.Series(found) if found else None


def updates_to(points: Sequence[tuple[int, float]], loss: float) -> float | None:
    """Return the length at which a curve of final losses, (updates, loss), the shortest first, reaches a loss.

    Returns:
        None with fewer than two points, or where the loss does not fall.
    """
    place = _place([(math.log(updates), value) for updates, value in points], loss)
    return None if place is None else math.exp(place)


def _place(points: Sequence[tuple[float, float]], loss: float) -> float | None:
    """Return where straight lines between (place, loss), the last one prolonged, reach a loss; None as above."""
    pairs = list(itertools.pairwise(points))
    if not pairs:
        return None
    (first, first_loss), (second, second_loss) = next((pair for pair in pairs if loss >= pair[1][1]), pairs[-1])
    if second_loss >= first_loss:
        return None
    return first + (first_loss - loss) / (first_loss - second_loss) * (second - first)


def _without_delay(ablation: Ablation, row: Row, seed: int) -> list[tuple[int, float]]:
    """Return (updates, loss) of a seed's trainings without delay, the shortest first."""
    points = []
    for group in ablation.groups:
        length, sync = length_of(group), ablation.sync(group)
        same = group[:2] == row.group[:2]
        if length is not None and same and sync is not None and seed in sync.losses.dropna().index:
            points.append((length, float(sync.losses[seed])))
    return sorted(points)


def updates_over(other: Result, own: Result, curves: pd.DataFrame) -> pd.Series:
    """Return, by seed, a row's updates over those after which another row has the same loss.

    The latter are read from the curve of the other row's training, with straight lines between its validations, the
    last of which is prolonged.
    """
    cells, found = _cells(other), {}
    for seed, cell in _cells(own).items():
        if seed in cells:
            points = curves[(curves.cell == cells[seed]) & (curves.metric == "val_loss")].sort_values("step")
            end = float(curves[curves.cell == cell].step.max())
            equal = _place(list(zip(points.step, points.value, strict=True)), float(own.losses[seed]))
            found[seed] = math.nan if equal is None else end / equal
    return pd.Series(found, dtype=float)


def _cells(result: Result) -> dict[int, str]:
    """Return the names of a row's trainings by seed."""
    return dict(zip(result.losses.dropna().index, result.cells, strict=True))


def compared(other: Result, own: Result, curves: pd.DataFrame, gain: float | None) -> pd.DataFrame:
    """Compare a row's trainings with another row's of the same seeds.

    Args:
        gain: updates per second of the row over those of the other one; None if that is not known.

    Returns:
        By seed: ``loss``, the difference; ``updates``, over those to the same loss; ``faster``, with a gain.
    """
    table = pd.DataFrame({"loss": difference(own, other), "updates": updates_over(other, own, curves)})
    return table if gain is None else table.assign(faster=gain / table.updates)


def main(argv: Sequence[str] | None = None) -> None:
    """Print what each row takes, with a delay, or against another optimizer's run without one."""
    parser = argparse.ArgumentParser(prog="python -m research.ablations.lengths")
    parser.add_argument("folder", type=Path, help="with results.csv and curves.csv")
    parser.add_argument("--gain", type=float, help="updates per second of all rows, over those compared with")
    parser.add_argument("--against", help="compare with Muon, Muon-ahead, ... without delay, not each row with its own")
    arguments = parser.parse_args(argv)
    ablation, curves = Ablation.of(*read_runs(arguments.folder)), read_curves(arguments.folder)
    delayed: dict[str, list[pd.DataFrame]] = {}
    for row in sorted(ablation.results, key=ablation.order):
        other = ablation.sync(row.group._replace(optimizer=arguments.against or row.optimizer))
        if other is None or other.row == row:
            continue
        table = compared(other, ablation.results[row], curves, arguments.gain)
        means = {name: f"{name} {table[name].mean():.{_DIGITS[name]}f} " for name in table}
        print(f"{row.name}:", ", ".join(means[name] + _half(name, half_width(table[name])) for name in table))
        if row.setting != NO_DELAY:
            delayed.setdefault(row.optimizer, []).append(table)
    for optimizer, tables in delayed.items():
        if 1 < len(tables) == len({row.group for row in ablation.results if row.optimizer == optimizer}):
            halves = {name: pooled_half_width([table[name] for table in tables], len(tables[0])) for name in tables[0]}
            print(f"{optimizer}, pooled:", ", ".join(f"{name} {_half(name, half)}" for name, half in halves.items()))


def _half(name: str, half: float | None) -> str:
    return "" if half is None else f"± {half:.{_DIGITS[name]}f}"


if __name__ == "__main__":
    main()
